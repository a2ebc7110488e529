//! Configurations of the device plugin, pods and nodes.

mod discover;
mod lint;
mod pods;
