"""A transformer run layer by layer on chosen rows. Knows no store."""

import logging

# `transformers` imports torchao for every model, if it is there: it names the kernels that it lacks, and torch an enum.
for _logger, _text in (("torchao", "Failed to load"), ("torch.utils._pytree", "register_constant")):
    logging.getLogger(_logger).addFilter(lambda record, text=_text: text not in record.getMessage())  # type: ignore[misc]
