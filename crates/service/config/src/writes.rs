//! How sources are changed: settings and checks. Sends no request.

use crate::values::SourceUrl;
use spurline_types::fault::Fault;
use spurline_types::parse_duration;
use std::time::Duration;

settings! {
    /// How a bucket is changed: by a mount with --rw, or by a node with --writable. There is nothing to check.
    #[derive(Copy, Eq)]
    #[command(next_help_heading = "Writing to a bucket")]
    pub struct BucketWrites {
        /// Writes to a bucket replace what others have written since the file was opened, in place of failing
        ///
        /// With --rw, or --writable of a node.
        #[arg(long)]
        pub last_writer_wins: bool,
        /// Write to a store that ignores or refuses the conditions of writes, which guard the changes of others
        ///
        /// With --rw, or --writable of a node. The conditions are tried at the start, which is refused without this flag
        /// if the store keeps no conditions.
        #[arg(long)]
        pub allow_unguarded_writes: bool,
        /// Most files and folders below a folder of a bucket that is renamed; programs copy a larger one
        ///
        /// With --rw, or --writable of a node. Each object is copied within the store and then removed.
        #[arg(long, value_name = "N")]
        pub rename_limit: u64 = 10_000,
        /// Abort uploads to a bucket that killed mounts have left behind when they are this old
        ///
        /// With --rw at the start, or --writable of a node at the start and every hour. Uploads of other programs are
        /// never touched. A file of another mount whose upload is aborted although it is still open is uploaded again
        /// when it is closed.
        #[arg(long, value_name = "TIME")]
        pub abort_uploads_after: Duration = parse_duration("1d"),
        /// Keep owner, mode, times, symbolic links and extended attributes in the metadata of a bucket's objects
        ///
        /// With --rw, or --writable of a node, of all nodes alike. The metadata are those that FSx for Lustre and
        /// DataSync write; those of s3fs are read and kept. A listing with attributes then costs a request for each
        /// name. Without this flag chmod, chown and changes of times have no effect, and succeed.
        #[arg(long)]
        pub object_attrs: bool,
    }
}

/// A volume that is changed, or a node that takes changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WritesConfig {
    /// User and group of all changes; `None` for the users of the calling processes.
    pub squash: Option<(u32, u32)>,
    /// How a bucket is changed.
    pub bucket: BucketWrites,
    /// Files of a bucket are staged: kept by two nodes, which upload later. Only for a volume that is changed through nodes.
    pub stage: bool,
}

impl WritesConfig {
    /// A given flag that has no effect without changes.
    pub(crate) fn given_flag(&self) -> Option<&'static str> {
        let given = [
            ("--squash", self.squash.is_some()),
            ("--last-writer-wins", self.bucket.last_writer_wins),
            ("--allow-unguarded-writes", self.bucket.allow_unguarded_writes),
            ("--object-attrs", self.bucket.object_attrs),
            ("--stage", self.stage),
        ];
        given.iter().find(|(_, given)| *given).map(|(flag, _)| *flag)
    }
}

/// Checks that the sources of a node that takes changes can be changed.
pub(crate) fn check_node_writes(
    writable: bool,
    writes: WritesConfig,
    sources: &[SourceUrl],
) -> Result<Option<WritesConfig>, Fault> {
    if !writable {
        return match writes.given_flag() {
            None => Ok(None),
            Some(flag) => Err(Fault::usage(
                format!("{flag} has no effect on a node that takes no changes"),
                "give --writable too, or leave it out",
            )),
        };
    }
    match sources.iter().find(|source| !matches!(source.scheme(), "file" | "s3")) {
        None => Ok(Some(writes)),
        Some(source) => Err(Fault::usage(
            format!("--writable: {source} is neither a directory nor an S3 bucket, and nodes change only those"),
            "leave --writable out, or serve that source from another node",
        )),
    }
}
