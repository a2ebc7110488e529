//! The models of MLPerf Storage as loads: sizes of files, batches, threads, and the time an accelerator computes. The figures are
//! those of the published configurations (v2.0 and v3.0, closed division). Reads nothing.

use crate::error::{BenchError, Result};
use crate::terminal::word_of;
use std::time::Duration;

/// A model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ModelName {
    /// Image segmentation: files of 147 MB, of very different lengths
    Unet3d,
    /// Object detection: images of 323 KB, one file each
    Retinanet,
    /// Image classification: 115 KB per image, 1251 in each file
    Resnet50,
    /// Cosmology: files of 2.8 MB
    Cosmoflow,
}

/// An emulated accelerator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum AcceleratorName {
    /// NVIDIA H100
    H100,
    /// NVIDIA B200
    B200,
}

/// A load: a model on a kind of accelerator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TrainLoad {
    pub model: ModelName,
    pub accelerator: AcceleratorName,
    /// Mean bytes of a sample.
    pub sample_bytes: f64,
    /// Standard deviation of that.
    pub deviation_bytes: f64,
    pub samples_per_file: u64,
    /// Samples of a step.
    pub batch: u64,
    /// Reader threads of an accelerator.
    pub threads: usize,
    /// Time that a step computes.
    pub compute: Duration,
    /// Utilisation that counts as fed.
    pub required: f64,
}

const UNET3D_LOAD: TrainLoad = TrainLoad {
    model: ModelName::Unet3d,
    accelerator: AcceleratorName::H100,
    sample_bytes: 146_600_628.0,
    deviation_bytes: 68_341_808.0,
    samples_per_file: 1,
    batch: 7,
    threads: 4,
    compute: Duration::from_micros(323_000),
    required: 0.90,
};

const TRAIN_LOADS: [TrainLoad; 6] = [
    UNET3D_LOAD,
    TrainLoad { accelerator: AcceleratorName::B200, compute: Duration::from_micros(162_000), ..UNET3D_LOAD },
    TrainLoad {
        model: ModelName::Retinanet,
        accelerator: AcceleratorName::H100,
        sample_bytes: 153_600.0,
        deviation_bytes: 51_200.0,
        samples_per_file: 1,
        batch: 16,
        threads: 8,
        compute: Duration::from_micros(180_000),
        required: 0.85,
    },
    TrainLoad {
        model: ModelName::Retinanet,
        accelerator: AcceleratorName::B200,
        sample_bytes: 322_957.0,
        deviation_bytes: 0.0,
        samples_per_file: 1,
        batch: 24,
        threads: 8,
        compute: Duration::from_micros(47_550),
        required: 0.85,
    },
    TrainLoad {
        model: ModelName::Resnet50,
        accelerator: AcceleratorName::H100,
        sample_bytes: 114_660.07,
        deviation_bytes: 0.0,
        samples_per_file: 1251,
        batch: 400,
        threads: 8,
        compute: Duration::from_micros(224_000),
        required: 0.90,
    },
    TrainLoad {
        model: ModelName::Cosmoflow,
        accelerator: AcceleratorName::H100,
        sample_bytes: 2_828_486.0,
        deviation_bytes: 71_311.0,
        samples_per_file: 1,
        batch: 1,
        threads: 4,
        compute: Duration::from_micros(3_500),
        required: 0.70,
    },
];

impl TrainLoad {
    /// The published load of a model on an accelerator.
    /// `Missing` where MLPerf Storage has none; the message names the existing loads.
    pub fn find(model: ModelName, accelerator: AcceleratorName) -> Result<TrainLoad> {
        let known = TRAIN_LOADS.iter().find(|load| (load.model, load.accelerator) == (model, accelerator)).copied();
        known.ok_or_else(|| {
            let others: Vec<String> =
                TRAIN_LOADS.iter().filter(|load| load.model == model).map(TrainLoad::accelerator_word).collect();
            BenchError::Usage(format!(
                "MLPerf Storage has no figures for {} on this accelerator: give --accelerator {}",
                word_of(&model),
                others.join(" or ")
            ))
        })
    }

    /// The model as on the command line.
    pub fn model_word(&self) -> String {
        word_of(&self.model)
    }

    /// The accelerator as on the command line.
    pub fn accelerator_word(&self) -> String {
        word_of(&self.accelerator)
    }

    /// Samples per second of an accelerator that never waits.
    pub fn samples_per_second(&self) -> f64 {
        self.batch as f64 / self.compute.as_secs_f64()
    }

    /// Bytes per second of an accelerator that never waits.
    pub fn bytes_per_second(&self) -> f64 {
        self.samples_per_second() * self.sample_bytes
    }

    /// Files per second of an accelerator that never waits.
    pub fn opens_per_second(&self) -> f64 {
        self.samples_per_second() / self.samples_per_file as f64
    }

    /// The files of a batch where each has one sample, else the bytes.
    pub fn batch_amount(&self) -> u64 {
        if self.samples_per_file == 1 { self.batch } else { (self.batch as f64 * self.sample_bytes) as u64 }
    }

    /// Mean length of a file.
    pub fn file_bytes(&self) -> f64 {
        self.sample_bytes * self.samples_per_file as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demands_are_the_published_ones() {
        let demand = |model, accelerator| TrainLoad::find(model, accelerator).unwrap().bytes_per_second() / 1e9;
        let near = |value: f64, published: f64| assert!((value / published - 1.0).abs() < 0.01, "{value} {published}");
        near(demand(ModelName::Unet3d, AcceleratorName::H100), 3.18);
        near(demand(ModelName::Unet3d, AcceleratorName::B200), 6.33);
        near(demand(ModelName::Retinanet, AcceleratorName::B200), 0.163);
        near(demand(ModelName::Resnet50, AcceleratorName::H100), 0.205);
        near(demand(ModelName::Cosmoflow, AcceleratorName::H100), 0.81);
        let retinanet = TrainLoad::find(ModelName::Retinanet, AcceleratorName::B200).unwrap();
        near(retinanet.opens_per_second(), 505.0);
        let error = TrainLoad::find(ModelName::Cosmoflow, AcceleratorName::B200).unwrap_err().to_string();
        assert!(error.contains("cosmoflow") && error.ends_with("--accelerator h100"), "{error}");
    }
}
