"""Who holds which token: layouts, packings, balancers and the local search."""
