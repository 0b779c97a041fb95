"""Window keys of a known prefix, copied into a sequence's ring."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from deepinfer_neuron.model.static.caches import WindowCache
from deepinfer_neuron.platform.regions import RegionModule, region


class WindowRestorer(RegionModule):
    """Copies pages to rings; one graph for all layers."""

    @region
    def restore(self, places: Tensor, cache: WindowCache) -> None:
        """Write records of pages to a ring.

        Args:
            places: int32 ``[2, w]``: ring places, then page places.
            cache: of one layer; written.
        """
        cache.ring.index_put_((places[0],), F.embedding(places[1], cache.pages))
