"""How every page looks: one sheet, light and dark."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2529; --soft: #66727a; --line: #d9dfe2; --page: #ffffff; --shade: #f4f6f7;
        --lasting: #b9c3c9; --held: #4f8fa8; --again: #e08a3c; --budget: #b3261e; --over: #dd9a93; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaec; --soft: #9aa6ad; --line: #3a444a; --page: #14191c;
        --shade: #1b2226; --lasting: #56626a; --held: #4b9fbd; --again: #e8a261; --budget: #f0776c; --over: #8d4a45; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p, .soft { color: var(--soft); margin: .2rem 0 .8rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem 1.4rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
.number { text-align: right; }
td:first-child { white-space: nowrap; } td.in { padding-left: 1.2rem; color: var(--soft); }
svg { width: 100%; height: auto; } text { fill: var(--soft); font-size: 12px; }
.name { fill: var(--ink); font-size: 14px; }
.axis { stroke: var(--line); } .shade { fill: var(--shade); } .lasting { fill: var(--lasting); }
.held { fill: var(--held); }
.again { fill: var(--again); } .budget { stroke: var(--budget); stroke-width: 1.5; stroke-dasharray: 6 4; }
.over { fill: var(--over); } .told { fill: var(--budget); } .peak { fill: var(--ink); }
.halo { paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round; }
.hit { fill: transparent; } .hit:hover { fill: var(--ink); fill-opacity: .25; }
.front { fill: none; stroke: var(--held); stroke-width: 2; } .below { fill: none; stroke: var(--soft);
       stroke-width: 1.5; stroke-dasharray: 3 3; } .no { stroke: var(--budget); stroke-width: 2; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""
