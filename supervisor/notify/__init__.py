"""A human is told: what is said (`message`), to whom (`settings`), by which means, and how often it is tried.

Imports nothing by itself: `lightkeeper notify` starts its command before it needs most of this.
"""
