//! The checks before a bucket is changed: the store keeps the conditions of writes, and what other mounts left behind is completed
//! or removed. Knows no open file.

use crate::probe::{describe_unguarded, find_unkept_condition};
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
        let mut requests = BucketRequests::new(bucket, origin.root())?;
        let root = origin.root();
        // A mount that may go on without conditions needs the result each time.
        let is_known = options.conditions_known && !options.allow_unguarded_writes;
        let unkept = if is_known { None } else { requests.run(find_unkept_condition(&requests, root))? };
        if let Some(unkept) = &unkept {
            let why = describe_unguarded(&requests.describe(), unkept);
            if !options.allow_unguarded_writes {
                let remedy = "if no other program writes there, give --allow-unguarded-writes";
                return Err(Error::new(ErrorKind::Unsupported, format!("{why}; {remedy}")));
            }
            tracing::warn!("--allow-unguarded-writes: {why}");
        }
        let is_guarded = unkept.is_none();
        if !is_guarded {
            requests.send_no_conditions();
        }
        if options.stage {
            requests.stage_changes();
        }
        let requests = Arc::new(requests);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests::tests::options_for;
    use crate::requests::{NewObject, marked};
    use bytes::Bytes;
    use spurline_object_store::{ObjectAttributes, WriteCondition};
    use spurline_testkit::{ChaosProxy, ProxyFault, S3Server};
    use spurline_types::ErrorKind;

    #[test]
    fn a_store_that_refuses_conditions_is_written_without_them_if_that_is_allowed() {
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("bucket");
        server.refuse_conditions();
        let config = options_for(&server);
        let mut options = BucketWriteOptions::new(0, 0);
        let check = |config: &OriginOptions, options: &BucketWriteOptions| {
            CheckedBucket::open("s3://bucket", config, options, Arc::default())
        };
        let refused = check(&config, &options).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        for word in ["refuses the condition of PutObject with If-None-Match: *", "--allow-unguarded-writes"] {
            assert!(refused.message().contains(word), "{refused}");
        }
        options.allow_unguarded_writes = true;
        let checked = check(&config, &options).unwrap();
        assert!(!checked.is_guarded);
        let attributes = marked(ObjectAttributes::with_content_type("text/plain"));
        let object = NewObject { key: "to", attributes: &attributes, condition: &WriteCondition::Absent };
        let requests = &checked.requests;
        requests.run(requests.put(&object, Bytes::from_static(b"bytes"))).unwrap();
        let version = WriteCondition::Version("another".to_owned());
        requests.run(requests.delete("to", &version)).unwrap();
        assert_eq!(server.keys("bucket"), Vec::<String>::new());
        // A store that takes no writes at all.
        let proxy = ChaosProxy::start(server.address()).unwrap();
        proxy.inject_on(Some("PUT"), "", ProxyFault::Error(501, "NotImplemented", "read-only"), u32::MAX);
        let config = OriginOptions { endpoint: Some(proxy.endpoint()), ..options_for(&server) };
        let refused = check(&config, &options).err().unwrap();
        assert!(refused.message().contains("does not offer the write of"), "{refused}");
    }
}
