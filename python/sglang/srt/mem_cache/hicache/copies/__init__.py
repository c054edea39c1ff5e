"""Copies between the tiers: plans become row indices here, and bytes move."""
