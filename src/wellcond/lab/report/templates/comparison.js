/* Tabs with addresses, plots in the colours of the scheme, methods shown or hidden. */
(function () {
  "use strict";
  var plots = JSON.parse(document.getElementById("plot-data").textContent);
  var hidden = {};
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var coarse = window.matchMedia("(pointer: coarse)").matches;
  var drawn = {};

  function colour(name) {
    var parts = name.slice(1).split("/");
    var found = getComputedStyle(document.documentElement).getPropertyValue("--" + parts[0]).trim();
    if (parts.length < 2) return found;
    var value = parseInt(found.slice(1), 16);
    return "rgba(" + (value >> 16) + "," + ((value >> 8) & 255) + "," + (value & 255) + "," + parts[1] + ")";
  }

  function coloured(node) {
    if (Array.isArray(node)) return node.map(coloured);
    if (node === null || typeof node !== "object") return node;
    var copy = {};
    Object.keys(node).forEach(function (key) {
      var value = node[key];
      var named = /color$/.test(key) && typeof value === "string" && value[0] === "@";
      copy[key] = named ? colour(value) : coloured(value);
    });
    return copy;
  }

  function draw(div) {
    var plot = coloured(plots[div.id]);
    var data = plot.data.filter(function (trace) { return !(trace.meta in hidden); });
    var layout = plot.layout;
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { color: colour("@ink"), size: 12, family: getComputedStyle(document.body).fontFamily };
    layout.hoverlabel = { bgcolor: colour("@card"), bordercolor: colour("@soft"), align: "left",
                          font: { color: colour("@ink"), size: 13 } };
    layout.dragmode = coarse ? false : "zoom";
    Plotly.react(div, data, layout, { responsive: true, displayModeBar: false });
    drawn[div.id] = true;
  }

  function drawVisible(again) {
    document.querySelectorAll(".plot").forEach(function (div) {
      if (div.offsetParent !== null && (again || !drawn[div.id])) draw(div);
      else if (again) delete drawn[div.id];
    });
  }

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
    drawVisible(false);
  }

  /* The address may name a tab, or anything inside of one. */
  function followAddress() {
    var target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    var panel = target ? target.closest(".tab") : null;
    select(Math.max(0, panels.indexOf(panel)), false, false);
    if (!panel || target === panel) return;
    var folded = target.closest("details");
    if (folded) folded.open = true;
    drawVisible(false);
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
      if (method in hidden) delete hidden[method]; else hidden[method] = true;
      document.querySelectorAll('button[data-method="' + method + '"]').forEach(function (same) {
        same.setAttribute("aria-pressed", method in hidden ? "false" : "true");
      });
      drawVisible(true);
    });
  });
  document.querySelectorAll("details").forEach(function (details) {
    details.addEventListener("toggle", function () { drawVisible(false); });
  });
  dark.addEventListener("change", function () { drawVisible(true); });
  window.addEventListener("beforeprint", function () {
    panels.forEach(function (panel) { panel.hidden = false; });
    drawVisible(false);
  });
  window.addEventListener("afterprint", followAddress);
  window.addEventListener("popstate", followAddress);
  followAddress();
})();
