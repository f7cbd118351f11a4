"""Quantised linears: each layer stays in its stored number type; integer types compute as integers where they can."""
