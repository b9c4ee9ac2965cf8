"""Servers and their clients in virtual time: production's own engine, whose steps cost what a
function says. No torch."""
