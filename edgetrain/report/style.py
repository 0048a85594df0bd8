"""How every page looks: one sheet, light and dark, wide and narrow.

Colours of ops and lines are variables, because the script that draws on a canvas reads them from here.
"""

_LIGHT = """
  --ink: #1b2327; --soft: #647079; --line: #dde3e6; --page: #ffffff; --shade: #f4f6f7; --card: #f8fafb;
  --lasting: #b9c3c9; --held: #4f8fa8; --recomputed: #e08a3c; --budget: #b3261e; --over: #dd9a93; --accent: #1f6f8b;
  --c0: #3f72af; --c1: #2a9d8f; --c2: #8267be; --c3: #d2a13a; --c4: #7ea85a; --c5: #4aa3c7; --c6: #c75d86;
  --c7: #97a4ab; --c8: #b5653c; --c9: #b3261e; --c10: #c6ced2; --on-bar: #ffffff;
  --forward: #4f8fa8; --backward: #8d79c2; --update: #c98b5a; --gap: #dde3e6;
  --power: #c8553d; --utilisation: #2f7f6f; --process: #2f7f6f; --gpu: #5b7f2b; --memory: #3f72af; --available: #7f95a3;
  --temperature: #b8632a; --frequency: #7a4ea3; --waiting: #8a7a3c; --other: #66727a;
  --measured: #1d7a4f; --derived: #2a6496; --modelled: #9a6700; --unavailable: #6b7780;
"""
_DARK = """
  --ink: #e6eaec; --soft: #98a5ad; --line: #333d43; --page: #12171a; --shade: #191f23; --card: #181e22;
  --lasting: #56626a; --held: #4b9fbd; --recomputed: #f0a45a; --budget: #f0776c; --over: #8d4a45; --accent: #6cc0dd;
  --c0: #5b8fd0; --c1: #3bb3a4; --c2: #9c84d8; --c3: #dcb354; --c4: #8fbb69; --c5: #62b7da; --c6: #d97a9f;
  --c7: #7d8a92; --c8: #cf8055; --c9: #f0776c; --c10: #56626a; --on-bar: #0d1214;
  --forward: #4b9fbd; --backward: #9a86d1; --update: #d39a6c; --gap: #333d43;
  --power: #f0806a; --utilisation: #56b8a4; --process: #56b8a4; --gpu: #93c05a; --memory: #74a6e6; --available: #8fa5b3;
  --temperature: #e0935c; --frequency: #b590e0; --waiting: #c2b06a; --other: #98a5ad;
  --measured: #63c795; --derived: #7cb8ea; --modelled: #e2b04a; --unavailable: #98a5ad;
"""

_PAGE = """
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
       background: var(--page); max-width: 68rem; margin: 2rem auto 4rem; padding: 0 1rem;
       -webkit-text-size-adjust: 100%; }
h1 { font-size: 1.6rem; line-height: 1.2; letter-spacing: -.01em; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .3rem; }
p, .soft { color: var(--soft); } p { margin: .2rem 0 .8rem; overflow-wrap: anywhere; } .small { font-size: .8rem; }
.run + .run { margin-top: 4rem; padding-top: 2rem; border-top: 2px solid var(--line); }
a { color: var(--accent); }
code { font-size: .88em; overflow-wrap: anywhere; }
.status { font-size: .8rem; font-weight: 600; padding: .1rem .5rem; border-radius: 1rem; background: var(--shade); }
.status.finished { color: var(--measured); } .status.failed, .status.stopped { color: var(--budget); }
.status.running { color: var(--modelled); }
.notes { margin: 1rem 0; padding: .6rem 1rem .6rem 2rem; border-left: 3px solid var(--recomputed);
       background: var(--shade); border-radius: 0 .4rem .4rem 0; font-size: .92rem; overflow-wrap: anywhere; }
"""

_TABLES = """
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .3rem 1.4rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; font-size: .85rem; color: var(--soft); }
.number { text-align: right; white-space: nowrap; }
.words { white-space: normal; min-width: 8rem; max-width: 24rem; overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; } td.in { padding-left: 1.2rem; color: var(--soft); }
.group th { padding-top: 1.2rem; color: var(--ink); font-size: .95rem; }
.group th::first-letter { text-transform: capitalize; }
.results td:first-child { white-space: normal; min-width: 9rem; overflow-wrap: anywhere; }
.data { width: 100%; font-size: .9rem; } .data td, .data th { padding: .3rem .9rem .3rem 0; line-height: 1.3; }
.data td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
.data th button { all: unset; cursor: pointer; } .data th button:focus-visible { outline: 2px solid var(--accent); }
.data th button:hover { color: var(--ink); }
th[aria-sort=descending] button::after { content: " ↓"; }
th[aria-sort=ascending] button::after { content: " ↑"; }
.data.short tbody tr:nth-child(n+16) { display: none; }
.data tbody tr:hover { background: var(--shade); }
.share { position: relative; min-width: 7rem; }
.share .bar { position: absolute; right: .9rem; bottom: .3rem; height: 3px; border-radius: 2px;
       background: var(--accent); opacity: .5; }
.find { all: unset; cursor: pointer; border-bottom: 1px dotted var(--soft); overflow-wrap: anywhere; }
.find:hover, .find:focus-visible { color: var(--accent); border-color: var(--accent); }
.tabs { display: flex; gap: .3rem; margin: .4rem 0 .6rem; flex-wrap: wrap; }
.tabs button, .more, .tools button { font: inherit; font-size: .88rem; color: var(--ink); background: var(--shade);
       border: 1px solid var(--line); border-radius: .45rem; padding: .25rem .8rem; cursor: pointer; }
.tabs button span { color: var(--soft); font-size: .8rem; }
.tabs button[aria-pressed=true] { background: var(--accent); border-color: var(--accent); color: var(--page); }
.tabs button[aria-pressed=true] span { color: inherit; opacity: .8; }
.tabs button:hover, .more:hover, .tools button:hover { border-color: var(--accent); }
.more { margin-top: .6rem; } .tab[hidden] { display: none; }
"""

_CARDS = """
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .8rem; margin: 1.2rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .7rem; padding: .8rem 1rem;
       min-width: 0; }
.card .what { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.card .figure { font-size: 1.7rem; font-weight: 650; letter-spacing: -.02em; line-height: 1.25; overflow-wrap: anywhere;
       font-variant-numeric: tabular-nums; }
.card .figure small { font-size: .9rem; font-weight: 500; color: var(--soft); letter-spacing: 0; }
.card .from { font-size: .8rem; color: var(--soft); display: flex; gap: .5rem; align-items: center; flex-wrap: wrap; }
.cards.lead { grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); }
.cards.lead .figure { font-size: 2.6rem; }
.tag { display: inline-block; font-size: .72rem; line-height: 1.5; padding: 0 .45rem; border-radius: 1rem;
       border: 1px solid currentColor; white-space: nowrap; }
.tag.measured { color: var(--measured); } .tag.derived { color: var(--derived); }
.tag.modelled { color: var(--modelled); border-style: dashed; }
.tag.unavailable { color: var(--unavailable); border-style: dotted; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; margin: .5rem 0;
       font-size: .85rem; }
.legend i { display: inline-block; width: .75rem; height: .75rem; border-radius: .2rem; margin-right: .35rem;
       vertical-align: -.06rem; }
.phases { display: flex; height: 2.2rem; border-radius: .5rem; overflow: hidden; margin: .6rem 0; }
.phases span { flex-basis: 0; min-width: 1px; color: var(--on-bar); font-size: .85rem; line-height: 2.2rem;
       padding-left: .5rem; overflow: hidden; white-space: nowrap; }
.phases span:empty { padding: 0; } .phases .p-gap { color: var(--soft); }
.p-forward { background: var(--forward); } .p-backward { background: var(--backward); }
.p-update { background: var(--update); } .p-gap { background: var(--gap); }
.recomputed-piece { background-image: repeating-linear-gradient(45deg, var(--recomputed) 0 5px, transparent 5px 10px); }
.recomputed-mark { background: linear-gradient(var(--lasting) 65%, var(--recomputed) 65%); }
"""

_VIEW = """
.view { position: relative; margin: .6rem 0; }
.tools { display: flex; gap: .3rem; align-items: center; margin-bottom: .4rem; flex-wrap: wrap; }
.tools button { min-width: 2.2rem; padding: .15rem .6rem; }
.tools .shown { margin-left: auto; font-size: .82rem; color: var(--soft); font-variant-numeric: tabular-nums; }
.view canvas { display: block; width: 100%; touch-action: pan-y; cursor: crosshair; border-radius: .5rem;
       background: var(--card); outline: 1px solid var(--line); }
.view canvas:focus-visible { outline: 2px solid var(--accent); }
.tip { position: absolute; z-index: 2; pointer-events: none; background: var(--page); color: var(--ink);
       font-size: .82rem;
       border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .7rem; width: 25rem; line-height: 1.4;
       box-shadow: 0 6px 24px rgb(0 0 0 / .18); }
.tip b { display: block; overflow-wrap: anywhere; } .tip .where { color: var(--soft); overflow-wrap: anywhere; }
.tip dl { display: grid; grid-template-columns: auto 1fr; gap: 0 .8rem; margin: .3rem 0 0; }
.tip dt { color: var(--soft); } .tip dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
.tip[hidden] { display: none; }
.hint { color: var(--soft); font-size: .8rem; margin: .35rem 0 0; }
@media (max-width: 44rem) {
  body { margin-top: 1rem; padding: 0 .8rem; } h1 { font-size: 1.3rem; }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .5rem; } .card { padding: .6rem .7rem; }
  .card .figure { font-size: 1.45rem; } .cards.lead { grid-template-columns: 1fr; }
  .cards.lead .figure { font-size: 2rem; }
  .tip { position: static; width: auto; margin-top: .4rem; box-shadow: none; }
  .scroll > svg { width: auto; min-width: 42rem; max-width: none; }
  .results td:first-child, .data td:first-child { position: sticky; left: 0; z-index: 1; background: var(--page);
       background-clip: padding-box; }
  .group th { padding-top: 1.2rem; color: var(--ink); font-size: .95rem; }
.group th::first-letter { text-transform: capitalize; }
.results td:first-child { min-width: 7rem; max-width: 9rem; }
  td, th { padding-right: .8rem; } .results .wide { display: none; }
  .data td:first-child { min-width: 8rem; }
}
@media print { .tools, .hint, .more, .tabs { display: none; } body { max-width: none; } }
"""

_CHARTS = """
svg { width: 100%; height: auto; } text { fill: var(--soft); font-size: 12px; }
.name { fill: var(--ink); font-size: 14px; }
.axis { stroke: var(--line); } .shade { fill: var(--shade); } .lasting { fill: var(--lasting); }
.held { fill: var(--held); }
.recomputed { fill: var(--recomputed); } .budget { stroke: var(--budget); stroke-width: 1.5; stroke-dasharray: 6 4; }
.over { fill: var(--over); } .mark-name { fill: var(--budget); } .peak { fill: var(--ink); }
.halo { paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round; }
.hit { fill: transparent; } .hit:hover { fill: var(--ink); fill-opacity: .25; }
.front { fill: none; stroke: var(--held); stroke-width: 2; } .below { fill: none; stroke: var(--soft);
       stroke-width: 1.5; stroke-dasharray: 3 3; } .no { stroke: var(--budget); stroke-width: 2; }
"""

_BARS = """
.bars { display: grid; grid-template-columns: max-content 1fr; gap: 0 .9rem; align-items: center; margin: .6rem 0; }
.bars .of { text-align: right; font-size: .9rem; }
.track { position: relative; display: block; height: 2.1rem; min-width: 0; }
.track > * { position: absolute; }
.track > i { top: .25rem; bottom: .25rem; }
.track > i.mark { top: 0; bottom: 0; border-left: 2px dashed var(--budget); }
.track > b { top: .3rem; padding-left: .5rem; font-weight: 500; font-size: .9rem; white-space: nowrap; }
.track.above { height: 1.3rem; }
.track > em { font-style: normal; font-size: .8rem; color: var(--budget); transform: translateX(-50%);
       white-space: nowrap; }
@media (max-width: 44rem) {
  .bars { grid-template-columns: 1fr; } .bars .of { text-align: left; margin-top: .4rem; }
  .bars .track { height: 1.8rem; }
}
"""

_COLOURS = "".join(f".c{n} {{ background: var(--c{n}); }}\n" for n in range(11))

STYLE = (
    f"\n:root {{ color-scheme: light dark; {_LIGHT} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}\n"
    + _PAGE
    + _TABLES
    + _CARDS
    + _VIEW
    + _CHARTS
    + _BARS
    + _COLOURS
)
