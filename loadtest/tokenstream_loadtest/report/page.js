"use strict";
const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
tip.setAttribute("aria-hidden", "true");
document.body.append(tip);
for (const title of document.querySelectorAll("svg :not(svg) > title")) {
  title.parentNode.setAttribute("data-tip", title.textContent);
  title.remove();
}
document.addEventListener("pointermove", (event) => {
  const marked = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  tip.hidden = marked === null;
  if (marked === null) return;
  tip.textContent = marked.getAttribute("data-tip");
  const left = Math.min(event.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const above = event.clientY - tip.offsetHeight - 12;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${above > 8 ? above : event.clientY + 18}px`;
});
document.addEventListener("scroll", () => { tip.hidden = true; }, { capture: true, passive: true });
for (const button of document.querySelectorAll("[data-copy]")) {
  if (!navigator.clipboard) continue;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
  });
}
