//! Staged objects of a cache group: acknowledged by the disks of two nodes of different failure domains, visible at once in the group, and
//! uploaded to the store later. [`StagedBackend`] is the store of a node with the staged objects above. Knows neither files nor folders nor
//! transports.
#![forbid(unsafe_code)]

mod aged;
mod backend;
mod client;
mod disk;
mod ended;
mod holder;
mod kept;
mod lapsing;
mod leader;
mod ledger;
mod manifest;
#[cfg(test)]
mod manifest_samples;
mod message;
mod peers;
mod service;
mod shared;

pub use backend::{ClassOf, StagedBackend};
pub use client::{StageClient, StageRefusal, StagedName};
pub use disk::{FolderDisk, KeptPart, PartWriter, RecordChange, StageDisk};
pub use manifest::{BucketKey, Manifest, StageClass};
pub use message::{UnsavedList, UnsavedObject};
pub use peers::{PeerFailure, StagePeers, TermFacts, TermRecord};
pub use service::{StageParts, StageService, StageSlot, StageSpace};
