"""Reports of a plan or of optimized graphs: figures as data, text for a terminal, one self-contained HTML page.

plan, graphs ─► *_figures (plain numbers) ─► *_text | *_html (with *_chart, *_charts as SVG) | JSON
"""
