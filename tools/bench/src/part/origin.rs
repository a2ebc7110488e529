//! A plain client: an object read by parallel ranges through the origin crate, into memory that is discarded; no cache, no mount.

use super::OriginPart;
use crate::error::{BenchError, Result};
use serde_json::json;
use spurline_origin::OriginOptions;
use spurline_types::{ObjectRef, SliceSink, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const ORIGIN_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn run(part: &OriginPart) -> Result<()> {
    let config = OriginOptions { endpoint: part.endpoint_url.clone(), ..OriginOptions::default() };
    let under = spurline_origin::open(&part.source, &config, Arc::new(Stats::default()))?;
    let attr = under.lookup(part.path.as_bytes(), Instant::now() + ORIGIN_TIMEOUT)?;
    let version = attr.version.clone();
    let object = ObjectRef::new(under.source_url(), part.path.as_bytes(), version, attr.size);
    let next = AtomicU64::new(0);
    let block = part.block.0.max(1);
    let start = Instant::now();
    let bytes = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..part.depth.max(1))
            .map(|_| {
                scope.spawn(|| -> Result<u64> {
                    let mut buffer = vec![0u8; block as usize];
                    let mut bytes = 0;
                    loop {
                        let at = next.fetch_add(block, Ordering::Relaxed);
                        if at >= object.size {
                            return Ok(bytes);
                        }
                        let len = (object.size - at).min(block) as usize;
                        let mut sink = SliceSink::new(&mut buffer[..len]);
                        under.read(&object, at, &mut sink, Instant::now() + ORIGIN_TIMEOUT)?;
                        bytes += len as u64;
                    }
                })
            })
            .collect();
        let mut sum = 0;
        for worker in workers {
            sum += worker.join().map_err(|_| BenchError::Failed("a reader panicked".into()))??;
        }
        Ok::<u64, BenchError>(sum)
    })?;
    let seconds = start.elapsed().as_secs_f64();
    println!("{}", json!({ "seconds": seconds, "bytes": bytes, "ops": bytes.div_ceil(block) }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::Size;

    #[test]
    fn a_directory_is_read_whole() {
        let dir = tempfile::tempdir().unwrap();
        crate::scratch::write_file(&dir.path().join("f"), 1, 5_000_000).unwrap();
        let mut part = OriginPart {
            source: dir.path().display().to_string(),
            path: "f".into(),
            endpoint_url: None,
            depth: 3,
            block: Size(1 << 20),
        };
        run(&part).unwrap();
        part.path = "absent".into();
        assert!(run(&part).is_err());
    }
}
