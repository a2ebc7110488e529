//! The checks before a bucket is changed: the store keeps the conditions of writes, and what other mounts left behind is completed
//! or removed. Knows no open file.

use super::BucketWriteOptions;
use super::probe::{find_ignored_condition, unguarded};
use super::rename_folder::{RenameRules, complete_renames};
use super::requests::BucketRequests;
use super::spilled::remove_leftovers;
use super::upload_record::abort_leftovers;
use crate::object_origin::ObjectOrigin;
use crate::{OriginOptions, SourceLocation};
use spurline_types::{Result, Stats};
use std::sync::Arc;

/// A bucket whose store was tried, without renames that were left behind.
pub(super) struct CheckedBucket {
    pub origin: ObjectOrigin,
    pub requests: Arc<BucketRequests>,
    pub options: BucketWriteOptions,
}

impl CheckedBucket {
    /// # Errors
    /// As [`super::WritableBucket::open`].
    pub fn open(
        url: &str,
        config: &OriginOptions,
        options: BucketWriteOptions,
        stats: Arc<Stats>,
    ) -> Result<CheckedBucket> {
        let (origin, requests) = connect(url, config, stats)?;
        let mut options = BucketWriteOptions { root: origin.root().to_owned(), ..options };
        // A mount that may go on without conditions needs the result each time.
        if options.allow_unguarded_writes || !options.conditions_known {
            options.last_writer_wins |= ignores_conditions(&requests, origin.root(), &options)?;
        }
        clean_up(&requests, origin.root(), &options, options.rename_rules())?;
        Ok(CheckedBucket { origin, requests, options })
    }
}

/// Completes or removes what mounts have left behind in a bucket whose store was tried before.
///
/// # Errors
/// As [`super::WritableBucket::open`].
pub(super) fn clean_up_bucket(
    url: &str,
    config: &OriginOptions,
    options: &BucketWriteOptions,
    stats: Arc<Stats>,
) -> Result<()> {
    let (origin, requests) = connect(url, config, stats)?;
    let mut rules = options.rename_rules();
    rules.guarded &= !options.allow_unguarded_writes || !ignores_conditions(&requests, origin.root(), options)?;
    clean_up(&requests, origin.root(), options, rules)
}

fn connect(url: &str, config: &OriginOptions, stats: Arc<Stats>) -> Result<(ObjectOrigin, Arc<BucketRequests>)> {
    let source = SourceLocation::parse(url)?;
    let bucket = crate::open_bucket(&source, config, stats)?;
    let origin = ObjectOrigin::new(source, Arc::clone(&bucket)).for_changes();
    let requests = Arc::new(BucketRequests::new(bucket, origin.root())?);
    Ok((origin, requests))
}

/// Tries the store: whether conditions have no effect, and need none.
///
/// # Errors
/// `Unsupported` when conditions are needed; the store's.
fn ignores_conditions(requests: &BucketRequests, root: &str, options: &BucketWriteOptions) -> Result<bool> {
    let Some(ignored) = requests.run(find_ignored_condition(requests, root))? else { return Ok(false) };
    let error = unguarded(&requests.describe(), ignored);
    if !options.allow_unguarded_writes {
        return Err(error);
    }
    tracing::warn!("--allow-unguarded-writes: {error}");
    Ok(true)
}

fn clean_up(requests: &BucketRequests, root: &str, options: &BucketWriteOptions, rules: RenameRules) -> Result<()> {
    requests.run(async {
        complete_renames(requests, root, rules).await;
        abort_leftovers(requests, root, options.abort_uploads_after).await;
        remove_leftovers(requests, root, options.abort_uploads_after).await;
        Ok(())
    })
}
