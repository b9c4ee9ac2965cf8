"""Where a batch is run: on a model (``local``), or in virtual time (``simulated``, ``hashing``)."""
