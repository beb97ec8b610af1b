// Shows the page of charts inside Locust's tab "Tokens", above its table: tabs of Locust's own making hold tables alone.
"use strict";
(() => {
  const root = document.getElementById("root");
  const frame = document.createElement("iframe");
  frame.title = "Token charts";
  frame.style.cssText = "border:0;margin:0 auto;max-width:1536px;width:100%";
  frame.addEventListener("load", () => {
    const body = frame.contentDocument?.body;
    if (body) new ResizeObserver(() => (frame.style.height = `${body.scrollHeight + 32}px`)).observe(body);
  });

  const follow = () => {
    const tab = root.querySelector('[role="tab"][aria-selected="true"]');
    const chosen = tab !== null && tab.textContent.trim() === "Tokens";
    if (chosen && !frame.isConnected) {
      frame.src = "tokenstream/";
      (tab.closest(".MuiContainer-root > *") ?? root).after(frame);
    }
    frame.style.display = chosen ? "block" : "none";
  };

  new MutationObserver(follow).observe(root, { attributeFilter: ["aria-selected"], childList: true, subtree: true });
  follow();
})();
