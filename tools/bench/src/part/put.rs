//! A plain client that writes objects: each in one request, or in parts that are sent while the next ones are read. It uses the
//! library that the origin crate has for reading, and neither a file nor a mount.

use super::{PutPart, written_block};
use crate::error::{BenchError, Result};
use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload, WriteMultipart};
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Parts of one object on the way, as a mount has.
const PARTS_AT_ONCE: usize = 4;

pub(super) fn run(part: &PutPart) -> Result<()> {
    let store = AmazonS3Builder::from_env().with_bucket_name(&part.bucket).with_allow_http(true).build();
    let store = store.map_err(|e| failed(&e))?;
    let threads = part.threads.max(1);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|e| BenchError::io("the threads of the client", &e))?;
    let bytes = Bytes::from(written_block(0, part.size.0));
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    let writers = (0..threads).map(|_| put_objects(&store, part, &bytes, &next));
    runtime.block_on(futures::future::try_join_all(writers))?;
    let seconds = start.elapsed().as_secs_f64();
    println!("{}", json!({ "seconds": seconds, "ops": part.files, "bytes": part.files as u64 * part.size.0 }));
    Ok(())
}

/// Writes objects until all have a writer.
async fn put_objects(store: &AmazonS3, part: &PutPart, bytes: &Bytes, next: &AtomicUsize) -> Result<()> {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= part.files {
            return Ok(());
        }
        let key = Path::from(format!("{}{number}", part.prefix));
        put_object(store, &key, bytes, part.part.0 as usize).await.map_err(|e| failed(&e))?;
    }
}

async fn put_object(store: &AmazonS3, key: &Path, bytes: &Bytes, part: usize) -> object_store::Result<()> {
    if bytes.len() <= part {
        store.put(key, PutPayload::from(bytes.clone())).await?;
        return Ok(());
    }
    let mut upload = WriteMultipart::new_with_chunk_size(store.put_multipart(key).await?, part);
    for from in (0..bytes.len()).step_by(part) {
        upload.wait_for_capacity(PARTS_AT_ONCE).await?;
        upload.put(bytes.slice(from..bytes.len().min(from + part)));
    }
    upload.finish().await?;
    Ok(())
}

fn failed(error: &object_store::Error) -> BenchError {
    BenchError::Failed(error.to_string())
}
