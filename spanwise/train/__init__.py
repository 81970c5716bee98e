"""The job behind ``spanwise train``: a small decoder trained on packed documents, the sequence cut over ranks.

``config`` says what to run, ``data`` packs files into sequences, ``model`` is the decoder, ``loop`` is the step on
every rank, ``launch`` starts the ranks, ``checkpoint`` and ``metrics`` keep what was reached, ``prove`` runs the same
steps on one device, ``display`` shows progress. Nothing else in the package imports this room.
"""
