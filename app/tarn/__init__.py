"""Tarn: a multi-tenant REST lakehouse for FollowTheMoney data."""
