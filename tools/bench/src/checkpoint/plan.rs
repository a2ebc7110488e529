//! The checkpoints of MLPerf Storage: models, the ranks of a host, and the files that each rank writes. Touches no file.

use crate::engine::pattern::FileList;
use std::path::Path;

/// A model whose checkpoints MLPerf Storage measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum CheckpointModel {
    /// 105 GB by 8 ranks
    #[value(name = "llama3-8b")]
    Llama3x8b,
    /// 912 GB by 64 ranks
    #[value(name = "llama3-70b")]
    Llama3x70b,
    /// 5.29 TB by 512 ranks, the weights by every second one
    #[value(name = "llama3-405b")]
    Llama3x405b,
    /// 18 TB by 1024 ranks, the weights by every second one
    #[value(name = "llama3-1t")]
    Llama3x1t,
}

/// Ranks of a host: the accelerators there, as in the subset mode of MLPerf Storage.
pub const RANKS_OF_HOST: usize = 8;
/// Bytes of the weights, of the 14 that a parameter has in a checkpoint: weights in 16 bits, and the optimizer's three
/// numbers in 32 bits each.
const WEIGHT_SHARE: f64 = 2.0 / 14.0;

impl CheckpointModel {
    /// Bytes and ranks of a checkpoint, as published (MLPerf Storage v2.0).
    pub fn published(self) -> (u64, usize) {
        const BYTES_PER_GB: u64 = 1_000_000_000;
        match self {
            CheckpointModel::Llama3x8b => (105 * BYTES_PER_GB, 8),
            CheckpointModel::Llama3x70b => (912 * BYTES_PER_GB, 64),
            CheckpointModel::Llama3x405b => (5_290 * BYTES_PER_GB, 512),
            CheckpointModel::Llama3x1t => (18_000 * BYTES_PER_GB, 1024),
        }
    }

    /// Mean bytes of a rank as published.
    pub fn rank_bytes(self) -> u64 {
        let (bytes, ranks) = self.published();
        bytes / ranks as u64
    }

    /// Whether only every second rank writes weights: two replicas, and a shared optimizer (ZeRO 1).
    fn shares_weights(self) -> bool {
        matches!(self, CheckpointModel::Llama3x405b | CheckpointModel::Llama3x1t)
    }
}

/// The files that a rank writes and reads: names and lengths, in the order of the writes.
pub type RankFiles = Vec<(String, u64)>;

pub fn lists_in(folder: &Path, ranks: &[&RankFiles]) -> Vec<FileList> {
    let list = |files: &&RankFiles| FileList::of_files(files.iter().map(|(name, len)| (folder.join(name), *len)));
    ranks.iter().map(list).collect()
}

/// The files of all ranks for checkpoint number `step`, with `size` bytes for a rank in the mean.
pub fn plan_ranks(model: CheckpointModel, ranks: usize, size: u64, step: u32) -> Vec<RankFiles> {
    let weights = (size as f64 * WEIGHT_SHARE) as u64;
    // Two ranks of two replicas: the first has the weights of both.
    let (own, shared) = if model.shares_weights() { (2 * weights, 0) } else { (weights, weights) };
    let files_of = |rank: usize| {
        let name = |kind| format!("step-{step:03}-rank-{rank:05}-{kind}.pt");
        let weights_here = if rank.is_multiple_of(2) || ranks == 1 { own } else { shared };
        let files = [(name("weights"), weights_here), (name("optimizer"), size - weights)];
        files.into_iter().filter(|(_, len)| *len > 0).collect()
    };
    (0..ranks).map(files_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_published_ones() {
        for (model, mean_gb) in [
            (CheckpointModel::Llama3x8b, 13.1),
            (CheckpointModel::Llama3x70b, 14.2),
            (CheckpointModel::Llama3x405b, 10.3),
            (CheckpointModel::Llama3x1t, 17.6),
        ] {
            let size = model.rank_bytes();
            assert!((size as f64 / 1e9 - mean_gb).abs() < 0.06, "{size}");
            let ranks = plan_ranks(model, 8, size, 1);
            let sum: u64 = ranks.iter().flatten().map(|(_, len)| len).sum();
            assert!((sum as f64 / (8 * size) as f64 - 1.0).abs() < 0.001, "{sum}");
        }
        let even = plan_ranks(CheckpointModel::Llama3x8b, 2, 14_000, 3);
        let lens = |files: &RankFiles| files.iter().map(|(_, len)| *len).collect::<Vec<_>>();
        assert_eq!((lens(&even[0]), lens(&even[1])), (vec![2_000, 12_000], vec![2_000, 12_000]));
        assert_eq!(even[1][0].0, "step-003-rank-00001-weights.pt");
        let replicas = plan_ranks(CheckpointModel::Llama3x405b, 2, 14_000, 1);
        assert_eq!((lens(&replicas[0]), lens(&replicas[1])), (vec![4_000, 12_000], vec![12_000]));
    }
}
