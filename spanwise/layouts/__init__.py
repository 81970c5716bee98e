"""Who holds which token: layouts, packings and balancers."""
