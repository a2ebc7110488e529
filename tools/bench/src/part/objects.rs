//! Plain clients of an object store, without a cache and a mount: reads through the origin crate, an object by parallel ranges or a
//! folder as `aws s3 sync` copies it, and writes through the library below that crate.

use super::{FetchPart, PartFigures, PutPart, made_content, numbered_path};
use crate::engine::{ThreadCrew, run_threads, to_the_end};
use crate::error::{BenchError, FileContext as _, Result};
use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload, WriteMultipart};
use parking_lot::Mutex;
use spurline_object_store::OriginOptions;
use spurline_origin::OriginStore;
use spurline_types::{FileKind, ObjectRef, SliceSink, Stats};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a range of an object.
const RANGE_BYTES: u64 = 4 << 20;
/// Bytes of a part of an object that is written; a smaller object is one request.
const PART_BYTES: usize = 8 << 20;
/// Parts of one object on the way, as a mount has.
const PARTS_AT_ONCE: usize = 4;
const ORIGIN_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn fetch(part: &FetchPart) -> Result<PartFigures> {
    let origin = spurline_origin::open(&part.source, &OriginOptions::default(), Arc::new(Stats::default()))?;
    if let Some(to) = &part.to {
        std::fs::create_dir_all(to).in_file(to)?;
        let listed = Mutex::new(ObjectListing::default());
        let work = |crew: &ThreadCrew, _| copy_objects(part, &*origin, &listed, to, crew);
        return Ok(run_threads(part.threads.max(1), work, to_the_end)?.into());
    }
    let attr = origin.lookup(part.path.as_bytes(), Instant::now() + ORIGIN_TIMEOUT)?;
    let object = ObjectRef::new(origin.source_url(), part.path.as_bytes(), attr.version.clone(), attr.size);
    let work = |crew: &ThreadCrew, _| read_ranges(&*origin, &object, crew);
    Ok(run_threads(part.threads.max(1), work, to_the_end)?.into())
}

/// Reads ranges into memory that is discarded.
fn read_ranges(origin: &dyn OriginStore, object: &ObjectRef, crew: &ThreadCrew) -> Result<()> {
    let mut buffer = vec![0u8; RANGE_BYTES as usize];
    while let Some(number) = crew.take(object.size.div_ceil(RANGE_BYTES) as usize) {
        let at = number as u64 * RANGE_BYTES;
        let len = (object.size - at).min(RANGE_BYTES);
        let mut sink = SliceSink::new(&mut buffer[..len as usize]);
        origin.read(object, at, &mut sink, Instant::now() + ORIGIN_TIMEOUT)?;
        crew.add_bytes(len);
        crew.add_item();
    }
    Ok(())
}

/// Objects that are listed and not yet fetched, and the listing's cursor.
#[derive(Default)]
struct ObjectListing {
    waiting: Vec<(ObjectRef, String)>,
    cursor: Option<Vec<u8>>,
    is_whole: bool,
}

fn copy_objects(
    part: &FetchPart,
    origin: &dyn OriginStore,
    listed: &Mutex<ObjectListing>,
    to: &FilePath,
    crew: &ThreadCrew,
) -> Result<()> {
    let mut buffer = Vec::new();
    while !crew.is_stopped()
        && let Some((object, name)) = next_object(part, origin, listed)?
    {
        buffer.resize(object.size as usize, 0);
        origin.read(&object, 0, &mut SliceSink::new(&mut buffer), Instant::now() + ORIGIN_TIMEOUT)?;
        let to = to.join(name);
        std::fs::write(&to, &buffer).in_file(&to)?;
        crew.add_bytes(object.size);
        crew.add_item();
    }
    Ok(())
}

fn next_object(
    part: &FetchPart,
    origin: &dyn OriginStore,
    listed: &Mutex<ObjectListing>,
) -> Result<Option<(ObjectRef, String)>> {
    let mut listed = listed.lock();
    loop {
        if let Some(found) = listed.waiting.pop() {
            return Ok(Some(found));
        }
        if listed.is_whole {
            return Ok(None);
        }
        let cursor = listed.cursor.take();
        let page = origin.list(part.path.as_bytes(), cursor.as_deref(), 1000, Instant::now() + ORIGIN_TIMEOUT)?;
        listed.is_whole = page.next.is_none();
        listed.cursor = page.next;
        for entry in page.entries.into_iter().filter(|entry| entry.attr.kind == FileKind::File) {
            let name = String::from_utf8_lossy(&entry.name).into_owned();
            let path = format!("{}/{name}", part.path);
            let object = ObjectRef::new(origin.source_url(), path.as_bytes(), entry.attr.version, entry.attr.size);
            listed.waiting.push((object, name));
        }
    }
}

pub(super) fn put(part: &PutPart) -> Result<PartFigures> {
    let store = AmazonS3Builder::from_env().with_bucket_name(&part.bucket).with_allow_http(true).build();
    let store = store.map_err(|e| failed(&e))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|e| BenchError::io("the threads of the client", &e))?;
    let content = Bytes::from(made_content(part.bytes));
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    let writers = (0..part.threads.max(1)).map(|_| put_objects(&store, part, &content, &next));
    runtime.block_on(futures::future::try_join_all(writers))?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(PartFigures { seconds, ops: part.files as u64, bytes: part.files as u64 * part.bytes })
}

/// Writes objects until all have a writer.
async fn put_objects(store: &AmazonS3, part: &PutPart, content: &Bytes, next: &AtomicUsize) -> Result<()> {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= part.files {
            return Ok(());
        }
        let key = Path::from(numbered_path(FilePath::new(&part.prefix), number).to_string_lossy().as_ref());
        put_object(store, &key, content).await.map_err(|e| failed(&e))?;
    }
}

async fn put_object(store: &AmazonS3, key: &Path, content: &Bytes) -> object_store::Result<()> {
    if content.len() <= PART_BYTES {
        store.put(key, PutPayload::from(content.clone())).await?;
        return Ok(());
    }
    let mut upload = WriteMultipart::new_with_chunk_size(store.put_multipart(key).await?, PART_BYTES);
    for from in (0..content.len()).step_by(PART_BYTES) {
        upload.wait_for_capacity(PARTS_AT_ONCE).await?;
        upload.put(content.slice(from..content.len().min(from + PART_BYTES)));
    }
    upload.finish().await?;
    Ok(())
}

fn failed(error: &object_store::Error) -> BenchError {
    BenchError::Failed(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch;

    #[test]
    fn an_object_and_a_folder_are_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        std::fs::create_dir_all(source.join("set/deep")).unwrap();
        for n in 0..30u64 {
            scratch::write_file(&source.join(format!("set/{n}")), n, n * 300_000).unwrap();
        }
        let fetch_path = |path: &str, to: Option<&FilePath>| {
            let source = source.display().to_string();
            fetch(&FetchPart { source, path: path.into(), to: to.map(Into::into), threads: 3 })
        };
        let read = fetch_path("set/29", None).unwrap();
        assert_eq!((read.ops, read.bytes), (3, 29 * 300_000));
        assert!(fetch_path("absent", None).is_err());
        let to = dir.path().join("to");
        assert_eq!(fetch_path("set", Some(&to)).unwrap().ops, 30);
        assert_eq!(std::fs::read_dir(&to).unwrap().count(), 30);
        (0..30u64).for_each(|n| scratch::check_file(&to.join(n.to_string()), n, n * 300_000).unwrap());
        assert!(fetch_path("absent", Some(&to)).is_err());
    }
}
