// Polls `points` and draws it. Everything that is shown is set as text or as a number: nothing is parsed as markup.
"use strict";
(() => {
  if (window !== window.top) document.body.classList.add("framed"); // in Locust's tab, which has the table
  const WIDTH = 520, HEIGHT = 200, LEFT = 52, BOTTOM = 22, TOP = 8, PERIOD = 3000;
  const SVG = "http://www.w3.org/2000/svg";
  const shares = ["p50", "p95", "p99"];
  const charts = [
    { title: "TTFT, ms", keys: shares, lines: (d) => percentiles(d, "ttft") },
    { title: "ITL, ms", keys: shares, lines: (d) => percentiles(d, "itl") },
    { title: "tokens per second, of ended requests", keys: ["tokens/s"], lines: (d) => [d.tokens] },
    {
      title: "requests in the server, and users",
      keys: ["running", "waiting", "users"],
      lines: (d) => [d.samples.map((s) => [s[0], s[1]]), d.samples.map((s) => [s[0], s[2]]), d.points.map((p) => [p.at, p.users])],
    },
  ];

  const percentiles = (d, name) =>
    shares.map((_, i) => d.points.filter((p) => p[name]).map((p) => [p.at, p[name][i] * 1000]));

  const element = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const html = (name, className, text) => {
    const made = document.createElement(name);
    made.className = className;
    made.textContent = text;
    return made;
  };

  const short = (value) => (value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toPrecision(2));

  function draw(svg, lines) {
    const all = lines.flat();
    const last = Math.max(1, ...all.map((p) => p[0]));
    const most = (Math.max(0, ...all.map((p) => p[1])) || 1) * 1.05;
    const x = (at) => LEFT + (at / last) * (WIDTH - LEFT - 8);
    const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
    svg.replaceChildren();
    for (const share of [0, 0.5, 1]) {
      const value = (share * most) / 1.05;
      svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - 8, y1: y(value), y2: y(value) }));
      if (all.length) svg.append(element("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    }
    if (!all.length) return;
    svg.append(element("text", { x: WIDTH - 8, y: HEIGHT - 5, "text-anchor": "end" }, `${last.toFixed(0)} s`));
    lines.forEach((line, i) => {
      const points = line.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
      svg.append(element("polyline", { class: `line${i}`, points }));
    });
  }

  for (const chart of charts) {
    const figure = document.createElement("figure");
    const key = html("div", "key", "");
    chart.keys.forEach((name, i) => key.append(html("span", `key${i}`, name)));
    chart.svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": chart.title });
    figure.append(html("figcaption", "", chart.title), chart.svg, key);
    document.getElementById("charts").append(figure);
  }

  function said(data) {
    const { state, why, flaws, report } = data.standing;
    if (state === "none") return "waiting for a test";
    if (state === "refused") return `the test cannot begin: ${why}`;
    const ended = data.points.reduce((sum, p) => sum + p.requests, 0);
    const errors = data.points.reduce((sum, p) => sum + p.errors, 0);
    const parts = [`${ended} requests ended, ${errors} of them in errors`];
    if (state === "over") parts.push(flaws.length ? `NOT VALID: ${flaws.join("; ")}` : "valid");
    if (why) parts.push(why);
    if (report) parts.push(`report: ${report}`);
    return parts.join(". ");
  }

  function show(data) {
    for (const chart of charts) draw(chart.svg, chart.lines(data));
    document.getElementById("rows").replaceChildren(
      ...data.rows.map((row) => {
        const line = document.createElement("tr");
        for (const key of ["metric", "p50", "p95", "p99", "max", "count"]) line.append(html("td", "", row[key] ?? "–"));
        return line;
      }),
    );
    document.getElementById("objectives").replaceChildren(
      ...data.objectives.map((one) => html("li", one.met === null ? "open" : one.met ? "met" : "missed", one.name)),
    );
    document.getElementById("state").textContent = said(data);
  }

  async function poll() {
    try {
      const response = await fetch("points", { cache: "no-store" });
      if (!response.ok) throw new Error(`HTTP ${response.status}`);
      show(await response.json());
    } catch (error) {
      document.getElementById("state").textContent = `Locust does not answer: ${error.message}`;
    }
    setTimeout(poll, PERIOD);
  }
  poll();
})();
