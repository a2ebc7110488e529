//! Opens the origin of a URL, of whatever kind. Sends no request.

use crate::OriginStore;
use crate::directory::DirectoryOrigin;
use crate::object_origin::ObjectOrigin;
use spurline_object_store::{OriginOptions, SourceLocation, SourceScheme, open_bucket};
use spurline_types::{Result, Stats};
use std::sync::Arc;

/// Opens the origin at `url`. It sends no request yet (see [`OriginStore::check`]).
///
/// # Errors
/// `Invalid` or `Unsupported` for an impossible URL or configuration.
pub fn open(url: &str, config: &OriginOptions, stats: Arc<Stats>) -> Result<Arc<dyn OriginStore>> {
    let source = SourceLocation::parse(url)?;
    if source.scheme() == SourceScheme::Directory {
        return Ok(Arc::new(DirectoryOrigin::new(source, config, stats)));
    }
    let bucket = open_bucket(&source, config, stats)?;
    Ok(Arc::new(ObjectOrigin::new(source, bucket)))
}
