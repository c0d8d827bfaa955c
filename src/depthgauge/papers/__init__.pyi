from depthgauge.papers.ledger.registry import claims as claims
from depthgauge.papers.separation.probability import separate as separate
from depthgauge.papers.trained_depth.bounded_training import TrainedModel as TrainedModel
from depthgauge.papers.trained_depth.bounded_training import TrainingOptions as TrainingOptions
from depthgauge.papers.trained_depth.bounded_training import train_bounded as train_bounded
from depthgauge.papers.trained_depth.output_bound import OutputBound as OutputBound
from depthgauge.papers.trained_depth.output_bound import output_bound as output_bound
