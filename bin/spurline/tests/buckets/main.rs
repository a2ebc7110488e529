//! Buckets that are written, end to end with the real binary: alone and through nodes, attributes, renames, faults of the store,
//! unmounts, and the S3 programs of others.

mod attrs;
mod faults;
mod handles;
mod hot;
mod locks;
mod nodes;
mod objects;
mod programs;
mod promises;
mod recover;
mod renames;
mod rules;
mod staged;
mod staged_kills;
mod storage;
mod strangers;
mod unmounts;
