"""Programs that measure; none is needed to run the product."""
