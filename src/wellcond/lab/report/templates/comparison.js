/* Tabs with addresses, methods shown or hidden. */
(function () {
  "use strict";
  var tabs = Array.prototype.slice.call(document.querySelectorAll("nav.tabs a"));
  var panels = tabs.map(function (tab) { return document.querySelector(tab.getAttribute("href")); });

  function select(at, focus, remember) {
    tabs.forEach(function (tab, i) {
      tab.setAttribute("aria-selected", i === at ? "true" : "false");
      tab.tabIndex = i === at ? 0 : -1;
      panels[i].hidden = i !== at;
    });
    var list = tabs[at].parentNode;
    var left = tabs[at].offsetLeft, right = left + tabs[at].offsetWidth;
    if (left < list.scrollLeft || right > list.scrollLeft + list.clientWidth) list.scrollLeft = left - 24;
    if (focus) tabs[at].focus({ preventScroll: true });
    if (remember) history.pushState(null, "", tabs[at].getAttribute("href"));
  }

  /* The address may name a tab, or anything inside of one. */
  function followAddress() {
    var target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    var panel = target ? target.closest(".tab") : null;
    select(Math.max(0, panels.indexOf(panel)), false, false);
    if (!panel || target === panel) return;
    var folded = target.closest("details");
    if (folded) folded.open = true;
    target.scrollIntoView();
  }

  document.body.classList.add("scripted");
  document.querySelector("nav.tabs").setAttribute("role", "tablist");
  tabs.forEach(function (tab, at) {
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", panels[at].id);
    tab.id = "tab-" + panels[at].id;
    panels[at].setAttribute("role", "tabpanel");
    panels[at].setAttribute("aria-labelledby", tab.id);
    tab.addEventListener("click", function (event) { event.preventDefault(); select(at, true, true); });
    tab.addEventListener("keydown", function (event) {
      var last = tabs.length - 1;
      var to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last,
                 " ": at }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      select(to, true, true);
    });
  });
  document.querySelectorAll("button[data-method]").forEach(function (button) {
    button.addEventListener("click", function () {
      var method = button.dataset.method;
      var pressed = button.getAttribute("aria-pressed") === "false" ? "true" : "false";
      document.querySelectorAll('button[data-method="' + method + '"]').forEach(function (same) {
        same.setAttribute("aria-pressed", pressed);
      });
      document.querySelectorAll('svg [data-method="' + method + '"]').forEach(function (series) {
        series.style.display = pressed === "false" ? "none" : "";
      });
    });
  });
  window.addEventListener("beforeprint", function () {
    panels.forEach(function (panel) { panel.hidden = false; });
  });
  window.addEventListener("afterprint", followAddress);
  window.addEventListener("popstate", followAddress);
  followAddress();
})();
