//! The document of `info`: a file of a mount with the cached blocks, and the abilities of a writable source.

use super::SourceAbilities;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::info::FileInfo;

/// A file, from the view of a mount or a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InfoDocument {
    /// The file and the cached blocks.
    #[serde(flatten)]
    pub file: FileInfo,
    /// The abilities of the source; `None` where the mount is read-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writes: Option<SourceAbilities>,
    /// Where the next open of the file reads from; `None` where the mount is read-only, and for anything but a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<FileReads>,
}

/// Where a file of a writable mount is read from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FileReads {
    /// From cached bytes; otherwise from the source's file.
    pub cached: bool,
    /// Why not from cached bytes.
    pub why_not: Option<String>,
}

impl InfoDocument {
    /// Reads the document.
    ///
    /// # Errors
    /// When the document describes no file.
    pub fn from_json(document: &Value) -> Result<Self> {
        Self::deserialize(document).map_err(|error| {
            Error::new(ErrorKind::Protocol, format!("the description of the file is malformed: {error}"))
        })
    }

    /// The document.
    pub fn to_json(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}
