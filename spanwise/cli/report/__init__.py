"""Turns a plan into what a person reads: figures as data, text for a terminal, one self-contained HTML file.

    plan -> figures (plain numbers) -> text | html (svg inside) | JSON

Nothing here decides anything; every number is the plan's own.
"""
