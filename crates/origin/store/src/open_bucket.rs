//! Opens the bucket of a source with the client of its store. Sends no request.

use crate::backend::ObjectBackend;
use crate::config::OriginOptions;
use crate::object_store_backend::ObjectStoreBackend;
use crate::request_options::RequestOptions;
use crate::s3::S3Backend;
use crate::shared_buckets::SharedBucket;
use crate::source::{SourceLocation, SourceScheme};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;

/// The bucket of a source, which all origins share that were opened with the same [`crate::SharedBuckets`].
///
/// # Errors
/// `Invalid` for an impossible configuration.
pub fn open_bucket(source: &SourceLocation, config: &OriginOptions, stats: Arc<Stats>) -> Result<Arc<SharedBucket>> {
    config.shared_buckets.get_or_open(source, || {
        if source.scheme() != SourceScheme::S3 && config.request_options != RequestOptions::default() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "--sse, --sse-kms-key-id, --storage-class, --request-payer and --expected-bucket-owner are for s3://",
            ));
        }
        let backend: Box<dyn ObjectBackend> = match source.scheme() {
            SourceScheme::S3 => Box::new(S3Backend::new(source, config, Arc::clone(&stats))?),
            SourceScheme::Gcs | SourceScheme::Azure => Box::new(ObjectStoreBackend::new(source, config)?),
            SourceScheme::Directory => {
                return Err(Error::new(ErrorKind::Invalid, "it is no bucket"));
            }
        };
        SharedBucket::new(config, stats, backend)
    })
}
