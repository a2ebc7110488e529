//! `--from`: the facts of this host, or of another host from a file.

use clap::Args;
use spurline_config::Fault;
use spurline_fabric::HostTree;
use std::path::{Path, PathBuf};

/// The flag.
#[derive(Debug, Clone, Args)]
pub struct FromArgs {
    /// Facts of another host: a file of `net collect`, or a folder laid out like / [default: this host]
    #[arg(long, value_name = "FILE|DIR")]
    pub from: Option<PathBuf>,
}

impl FromArgs {
    /// The files to read.
    ///
    /// # Errors
    /// When the file or folder does not exist or holds no facts.
    pub fn tree(&self) -> Result<HostTree, Fault> {
        self.from.as_deref().map_or_else(|| Ok(HostTree::live()), open_facts)
    }
}

/// Facts collected elsewhere.
///
/// # Errors
/// When the path is neither a folder nor a file of `net collect`.
pub fn open_facts(path: &Path) -> Result<HostTree, Fault> {
    HostTree::open(path).map_err(|e| {
        Fault::missing(
            format!("facts in {}: {e}", path.display()),
            "give a file that `spurline net collect -o FILE.tar.zst` wrote, or a folder laid out like /",
        )
    })
}
