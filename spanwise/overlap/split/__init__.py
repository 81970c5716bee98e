"""Cut token-wise compute and the collectives next to it into pieces, so that one travels while another is computed."""
