"""Style sheet of the pages: system fonts, light and dark, nothing from the network."""

STYLE = """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#ffffff;--ink:#1b2229;--soft:#5b6570;--line:#dfe3e7;--grid:#e6e9ec;
--accent:#2969a8;--warm:#c2571a;--bad:#b3261e;--bad-page:#fdecea;--c0:#2969a8;--c1:#c2571a;--c2:#2e8056;--c3:#9a3b86;
--c4:#8a6d0b;--c5:#147f91;--c6:#b3261e;--c7:#6a5acd}
@media (prefers-color-scheme:dark){:root{--page:#14181c;--card:#1b2026;--ink:#e6eaee;--soft:#9aa6b2;--line:#323a43;
--grid:#2a3138;--accent:#78b4ea;--warm:#f0995a;--bad:#ff8a80;--bad-page:#3a1d1d;--c0:#78b4ea;--c1:#f0995a;--c2:#6cc799;
--c3:#dd8fcb;--c4:#d9bb4b;--c5:#5cc9dc;--c6:#ff8a80;--c7:#aaa0f5}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 4px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:18px 0}
p{margin:4px 0 12px;max-width:78ch}
.lead,small,figcaption small{color:var(--soft)}
small{font-weight:400}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;margin:14px 0 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(124px,1fr));gap:12px;margin:18px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:20px;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.tile.alarm{background:var(--bad-page);border-color:var(--bad)}.tile.alarm b{color:var(--bad)}
svg{display:block;height:auto}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
.scroll{overflow-x:auto}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.axis{fill:var(--soft)}.end{text-anchor:end}.middle{text-anchor:middle}
.cell{stroke:var(--line);stroke-width:1}.dead-cell{stroke:var(--bad);stroke-width:2}
svg .cell-text{text-anchor:middle;font-weight:600;font-variant-numeric:tabular-nums}
svg .dead-text{paint-order:stroke;stroke:#26282b;stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--grid);stroke-width:1}
.floor{stroke:var(--soft);stroke-width:1;stroke-dasharray:4 4}
.range{stroke:var(--accent);stroke-width:2;opacity:.45}.range.bad{stroke:var(--bad)}
.high-mark{fill:var(--accent)}.low-mark{fill:var(--warm)}.bad-mark{fill:var(--bad)}
.curve{fill:none;stroke-width:1.6;stroke-linejoin:round}.dashed{stroke-dasharray:5 3}
.c0{stroke:var(--c0)}.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.c3{stroke:var(--c3)}
.c4{stroke:var(--c4)}.c5{stroke:var(--c5)}.c6{stroke:var(--c6)}.c7{stroke:var(--c7)}
.dot{fill:var(--accent);opacity:.75}.dead-dot{fill:none;stroke:var(--bad);stroke-width:2;opacity:1}
.mean-line{fill:none;stroke:var(--warm);stroke-width:1.6}
figure{margin:12px 0 0}figcaption{font-weight:600;font-size:13px;overflow-wrap:anywhere}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:6px 14px}
.legend-row{display:flex;flex-wrap:wrap;gap:6px 28px;align-items:flex-start;margin-top:12px}
.legend{list-style:none;margin:0;padding:0;font-size:13px;color:var(--soft)}
.legend li{display:flex;gap:6px;align-items:center}.legend li b{color:var(--ink)}
.legend.inline{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:10px}
table{border-collapse:collapse;width:100%;font-size:13px}
caption{text-align:left;color:var(--soft);padding-bottom:6px}
th,td{padding:5px 9px;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;white-space:nowrap}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom}
tbody th{font-weight:600}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td.wide{white-space:normal;min-width:260px}
tr.dead td,tr.dead th{background:var(--bad-page)}
.tag{display:inline-block;border:1px solid currentColor;border-radius:99px;padding:0 8px;font-size:12px;font-weight:600}
.tag.alarm{color:var(--bad)}
ul.notes{padding-left:20px;margin:6px 0}ul.notes li{margin:6px 0;max-width:86ch}
summary{cursor:pointer;font-weight:600;margin-top:10px}
footer{color:var(--soft);font-size:13px}
@media print{section,.tile{break-inside:avoid}.scroll{overflow:visible}}
""".strip()
