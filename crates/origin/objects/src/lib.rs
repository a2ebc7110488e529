//! The changing side of a bucket: one file is one object. It knows neither inodes nor FUSE, and deliberately not which process sends
//! the store's requests: this one, or a node of the group.
//!
//! A close or a sync makes an object of a file's bytes, whole and under the condition that no other writer has changed it.
//! Others see the object before or the one after, never a mix. A folder is a marker `a/`, or whatever has keys below it.
//! Owners, modes and times are in the metadata of the objects, or else those of the options: a change of them then has no
//! effect, as programs that copy files need.
#![forbid(unsafe_code)]

mod absences;
mod byte_ranges;
mod change_log;
mod checked;
mod continued;
mod directory;
mod file;
mod file_attrs;
mod found;
mod last_known;
mod made_folders;
mod names;
mod new_files;
mod object;
mod open_table;
mod part_upload;
mod path_attrs;
mod probe;
mod published;
mod rename;
mod rename_folder;
mod rename_record;
mod requests;
mod spilled;
mod staged;
mod unpublished;
mod upload_record;
mod volume;
mod whole_file;
mod write_options;

pub use published::{PublishedBytes, PublishingOrigin};
pub use volume::WritableBucket;
pub use write_options::BucketWriteOptions;
