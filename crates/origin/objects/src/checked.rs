//! The checks before a bucket is changed: the store keeps the conditions of writes, and what other mounts left behind is completed
//! or removed. Knows no open file.

use crate::probe::{describe_unguarded, find_ignored_condition};
use crate::rename_folder::complete_renames;
use crate::requests::BucketRequests;
use crate::spilled::remove_leftovers;
use crate::upload_record::abort_leftovers;
use crate::write_options::BucketWriteOptions;
use spurline_object_store::{OriginOptions, SourceLocation};
use spurline_origin::ObjectOrigin;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;

/// A bucket whose store was tried, without renames that were left behind.
pub(crate) struct CheckedBucket {
    pub origin: ObjectOrigin,
    pub requests: Arc<BucketRequests>,
    /// The store keeps the conditions of writes.
    pub is_guarded: bool,
}

impl CheckedBucket {
    /// # Errors
    /// As [`crate::WritableBucket::open`].
    pub fn open(
        url: &str,
        config: &OriginOptions,
        options: &BucketWriteOptions,
        stats: Arc<Stats>,
    ) -> Result<CheckedBucket> {
        let source = SourceLocation::parse(url)?;
        let bucket = spurline_object_store::open_bucket(&source, config, stats)?;
        let origin = ObjectOrigin::new(source, Arc::clone(&bucket)).for_changes();
        let requests = Arc::new(BucketRequests::new(bucket, origin.root())?);
        let root = origin.root();
        // A mount that may go on without conditions needs the result each time.
        let is_known = options.conditions_known && !options.allow_unguarded_writes;
        let ignored = if is_known { None } else { requests.run(find_ignored_condition(&requests, root))? };
        if let Some(ignored) = ignored {
            let why = describe_unguarded(&requests.describe(), ignored);
            if !options.allow_unguarded_writes {
                let remedy = "if no other program writes there, give --allow-unguarded-writes";
                return Err(Error::new(ErrorKind::Unsupported, format!("{why}; {remedy}")));
            }
            tracing::warn!("--allow-unguarded-writes: {why}");
        }
        let is_guarded = ignored.is_none();
        let mut rules = options.rename_rules();
        rules.guarded &= is_guarded;
        requests.run(async {
            complete_renames(&requests, root, rules).await;
            abort_leftovers(&requests, root, options.abort_uploads_after).await;
            remove_leftovers(&requests, root, options.abort_uploads_after).await;
            Ok(())
        })?;
        Ok(CheckedBucket { origin, requests, is_guarded })
    }
}
