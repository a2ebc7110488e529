//! The rendered manifests.

mod deploy;
mod objects;
