"""Data sets that `--data` selects, augmentation, and the samplers that partition global batches over ranks."""

from train.data.all_data_sets import DATASETS, load_data
from train.data.augment import AUGMENTATIONS
from train.data.dataset import Data, DataOptions, Images
from train.data.download import download
from train.data.join_sampler import OwnSharesSampler, smallest_share
from train.data.sampler import DistributedBatchSampler
from train.data.synthetic import MAX_SAMPLES

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "MAX_SAMPLES",
    "Data",
    "DataOptions",
    "DistributedBatchSampler",
    "Images",
    "OwnSharesSampler",
    "download",
    "load_data",
    "smallest_share",
]
