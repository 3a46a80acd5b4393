"""Script and extra style of the comparison page: tabs, plots in the colours of the scheme, methods shown or hidden."""

SCRIPT = r"""
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
    data.forEach(function (trace) {
      if (trace.colorbar) trace.colorbar.tickfont = trace.colorbar.title.font = { color: colour("@soft"), size: 11 };
    });
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

  function select(at, focus) {
    tabs.forEach(function (tab, i) {
      tab.setAttribute("aria-selected", i === at ? "true" : "false");
      tab.tabIndex = i === at ? 0 : -1;
      panels[i].hidden = i !== at;
    });
    var list = tabs[at].parentNode;
    var left = tabs[at].offsetLeft, right = left + tabs[at].offsetWidth;
    if (left < list.scrollLeft || right > list.scrollLeft + list.clientWidth) list.scrollLeft = left - 24;
    if (focus) tabs[at].focus({ preventScroll: true });
    drawVisible(false);
  }

  document.body.classList.add("scripted");
  document.querySelector("nav.tabs").setAttribute("role", "tablist");
  tabs.forEach(function (tab, at) {
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", panels[at].id);
    tab.id = "tab-" + panels[at].id;
    panels[at].setAttribute("role", "tabpanel");
    panels[at].setAttribute("aria-labelledby", tab.id);
    tab.addEventListener("click", function (event) { event.preventDefault(); select(at, true); });
    tab.addEventListener("keydown", function (event) {
      var last = tabs.length - 1;
      var to = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last,
                 " ": at }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      select(to, true);
    });
  });
  document.querySelectorAll("button[data-method]").forEach(function (button) {
    button.addEventListener("click", function () {
      var method = button.dataset.method;
      if (method in hidden) delete hidden[method]; else hidden[method] = true;
      button.setAttribute("aria-pressed", method in hidden ? "false" : "true");
      drawVisible(true);
    });
  });
  dark.addEventListener("change", function () { drawVisible(true); });
  window.addEventListener("beforeprint", function () {
    panels.forEach(function (panel) { panel.hidden = false; });
    drawVisible(false);
  });
  window.addEventListener("afterprint", function () {
    select(Math.max(0, tabs.findIndex(function (tab) { return tab.tabIndex === 0; })), false);
  });
  var named = panels.findIndex(function (panel) { return "#" + panel.id === location.hash; });
  select(Math.max(0, named), false);
})();
""".strip()

EXTRA_STYLE = """
:root{--c8:#4b5563;--c9:#6b8e00;--p0:#2969a8;--p1:#7fb2dc;--p2:#c2571a;--p3:#8a6d0b;--p4:#9aa6b2}
@media (prefers-color-scheme:dark){:root{--c8:#b6c2cf;--c9:#b5d13b;--p0:#78b4ea;
--p1:#3f6f99;--p2:#f0995a;--p3:#d9bb4b;--p4:#5b6570}}
html{scroll-padding-top:64px}
nav.tabs{display:flex;gap:4px;overflow-x:auto;border-bottom:1px solid var(--line);margin:18px 0 0;scrollbar-width:thin}
nav.tabs a{padding:8px 13px;color:var(--soft);text-decoration:none;white-space:nowrap;
border-bottom:3px solid transparent;font-weight:600}
nav.tabs a:hover{color:var(--ink)}
nav.tabs a[aria-selected=true]{color:var(--ink);border-color:var(--accent)}
nav.tabs a:focus-visible,.methods button:focus-visible{outline:2px solid var(--accent);outline-offset:-2px}
.methods{display:none;flex-wrap:wrap;gap:6px;margin:14px 0 0;padding:0;list-style:none}
.scripted .methods{display:flex}
.methods button{font:inherit;font-size:13px;color:var(--ink);background:var(--card);border:1px solid var(--line);
border-radius:99px;padding:2px 11px;cursor:pointer;max-width:100%;overflow-wrap:anywhere;text-align:left}
.methods button[aria-pressed=false]{opacity:.5;text-decoration:line-through}
.chip{display:inline-block;width:18px;height:0;border-top:3px solid;margin-right:7px;vertical-align:middle}
.b0{border-color:var(--c0)}.b1{border-color:var(--c1)}.b2{border-color:var(--c2)}.b3{border-color:var(--c3)}
.b4{border-color:var(--c4)}.b5{border-color:var(--c5)}.b6{border-color:var(--c6)}.b7{border-color:var(--c7)}
.b8{border-color:var(--c8)}.b9{border-color:var(--c9)}
.d1{border-top-style:dotted}.d2,.d3{border-top-style:dashed}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:8px 18px;margin-top:10px}
.plots.wide{grid-template-columns:1fr}
.plots.two{grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr))}
thead th{white-space:normal}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.scroll{position:relative}
.plots>div{min-width:0}
.plots h4{font-size:13px;margin:6px 0 0;overflow-wrap:anywhere}
.plot{min-height:40px}
section>section{border:0;padding:0;margin:22px 0 0}section>section:first-of-type{margin-top:6px}
section.tab{margin:0 0 18px;border-top:0;border-radius:0 0 10px 10px}
h3{font-size:16px;margin:0 0 2px}
ul.small{font-size:13px;color:var(--soft)}
ul.notes li{overflow-wrap:anywhere}
td.t{white-space:normal;overflow-wrap:break-word;min-width:11ch;max-width:60ch}
tbody th{white-space:normal;overflow-wrap:break-word;max-width:40ch}
main{max-width:1180px}
@media (min-width:900px){section>section.half{display:inline-block;width:calc(50% - 12px);vertical-align:top;
margin-top:22px}.half:nth-of-type(odd){margin-right:20px}}
@media (max-width:600px){main{padding:16px 10px 40px}section{padding:14px 12px}h1{font-size:21px}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:6px}nav.tabs a{padding:8px 10px}}
@media print{.methods,nav.tabs{display:none!important}}
""".strip()
