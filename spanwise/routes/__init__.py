"""Who sends which rows of K/V to whom, and in which steps: data for all ranks, made from needs and a layout."""
