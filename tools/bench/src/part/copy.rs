//! A plain copy: every object of a folder fetched in parallel through the origin crate and written to a file, as `aws
//! s3 sync` does; no cache, no mount.

use super::CopyPart;
use crate::error::{BenchError, Result};
use serde_json::json;
use spurline_origin::{OriginOptions, OriginStore};
use spurline_types::{FileKind, ObjectRef, SliceSink, Stats};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const COPY_TIMEOUT: Duration = Duration::from_secs(60);

/// Objects that are listed and not yet fetched, and the listing's cursor.
#[derive(Default)]
struct CopyQueue {
    waiting: Vec<(ObjectRef, PathBuf)>,
    cursor: Option<Vec<u8>>,
    whole: bool,
}

pub(super) fn run(part: &CopyPart) -> Result<()> {
    let config = OriginOptions { endpoint: part.endpoint_url.clone(), ..OriginOptions::default() };
    let under = spurline_origin::open(&part.source, &config, Arc::new(Stats::default()))?;
    std::fs::create_dir_all(&part.to).map_err(|e| BenchError::io(part.to.display(), &e))?;
    let listed = Mutex::new(CopyQueue::default());
    let failed = AtomicBool::new(false);
    let start = Instant::now();
    let (bytes, files) = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..part.depth.max(1))
            .map(|_| {
                scope.spawn(|| -> Result<(u64, u64)> {
                    let mut bytes = 0;
                    let mut files = 0;
                    let mut buffer = Vec::new();
                    while let Some((object, to)) =
                        next_object(part, &*under, &listed).inspect_err(|_| failed.store(true, Ordering::Relaxed))?
                    {
                        if failed.load(Ordering::Relaxed) {
                            break;
                        }
                        buffer.resize(object.size as usize, 0);
                        under.read(&object, 0, &mut SliceSink::new(&mut buffer), Instant::now() + COPY_TIMEOUT)?;
                        std::fs::write(&to, &buffer).map_err(|e| BenchError::io(to.display(), &e))?;
                        bytes += object.size;
                        files += 1;
                    }
                    Ok((bytes, files))
                })
            })
            .collect();
        let mut sum = (0, 0);
        for worker in workers {
            let (bytes, files) = worker.join().map_err(|_| BenchError::Failed("a copier panicked".into()))??;
            sum = (sum.0 + bytes, sum.1 + files);
        }
        Ok::<_, BenchError>(sum)
    })?;
    println!("{}", json!({ "seconds": start.elapsed().as_secs_f64(), "bytes": bytes, "ops": files }));
    Ok(())
}

fn next_object(
    part: &CopyPart,
    under: &dyn OriginStore,
    listed: &Mutex<CopyQueue>,
) -> Result<Option<(ObjectRef, PathBuf)>> {
    let mut listed = listed.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if let Some(found) = listed.waiting.pop() {
            return Ok(Some(found));
        }
        if listed.whole {
            return Ok(None);
        }
        let folder = part.path.as_bytes();
        let page = under.list(folder, listed.cursor.as_deref(), 1000, Instant::now() + COPY_TIMEOUT)?;
        listed.whole = page.next.is_none();
        listed.cursor = page.next;
        for entry in page.entries.into_iter().filter(|entry| entry.attr.kind == FileKind::File) {
            let name = String::from_utf8_lossy(&entry.name).into_owned();
            let path = if folder.is_empty() { name.clone() } else { format!("{}/{name}", part.path) };
            let object = ObjectRef::new(under.source_url(), path.as_bytes(), entry.attr.version, entry.attr.size);
            listed.waiting.push((object, part.to.join(name)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_copied_whole() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        std::fs::create_dir_all(source.join("set/deep")).unwrap();
        for n in 0..30u64 {
            crate::scratch::write_file(&source.join(format!("set/{n}")), n, n * 1000).unwrap();
        }
        let to = dir.path().join("to");
        let mut part = CopyPart {
            source: source.display().to_string(),
            path: "set".into(),
            endpoint_url: None,
            to: to.clone(),
            depth: 3,
        };
        run(&part).unwrap();
        assert_eq!(std::fs::read_dir(&to).unwrap().count(), 30);
        (0..30u64).for_each(|n| crate::scratch::check_file(&to.join(n.to_string()), n, n * 1000).unwrap());
        part.path = "absent".into();
        assert!(run(&part).is_err());
    }
}
