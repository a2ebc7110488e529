//! Measures a cold sequential read of a large object through this crate beside a plain client of the same object-store
//! library with the same ranges and concurrency, interleaved, medians, with the CPU time of the reading process.
//!
//! `cargo run --release -p spurline-origin --example underbench [-- SIZE_MIB RANGE_MIB THREADS ROUNDS]`
//!
//! The S3 server is a process of its own (this program, started again), so its CPU time is not counted.

use object_store::ObjectStoreExt as _;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use spurline_origin::{AwsCredentials, EnvironmentSource, OriginOptions, OriginStore, open};
use spurline_testkit::{ACCESS_KEY, S3Server, SECRET_KEY};
use spurline_types::{ObjectRef, SliceSink, Stats};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

type AnyError = Box<dyn std::error::Error>;

fn main() -> Result<(), AnyError> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [first, dir] = words.as_slice()
        && first == "serve"
    {
        let server = S3Server::start(Path::new(dir))?;
        println!("{}", server.endpoint());
        for _ in std::io::stdin().lines() {}
        return Ok(());
    }
    let number = |i: usize, default: u64| words.get(i).and_then(|w| w.parse().ok()).unwrap_or(default);
    let (size, range) = (number(0, 1024) << 20, number(1, 4) << 20);
    let (threads, rounds) = (number(2, 8) as usize, number(3, 5) as usize);

    let dir = tempfile::tempdir()?;
    std::fs::create_dir(dir.path().join("bucket"))?;
    let mut file = std::fs::File::create(dir.path().join("bucket/big"))?;
    let block: Vec<u8> = (0..1u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for _ in 0..size >> 20 {
        file.write_all(&block)?;
    }
    drop(file);
    let mut server = Command::new(std::env::current_exe()?)
        .args(["serve".as_ref(), dir.path().as_os_str()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut endpoint = String::new();
    BufReader::new(server.stdout.take().ok_or("no output")?).read_line(&mut endpoint)?;
    let endpoint = endpoint.trim().to_owned();

    let config = OriginOptions {
        endpoint: Some(endpoint.clone()),
        credentials: Some(AwsCredentials {
            access_key_id: ACCESS_KEY.into(),
            secret_access_key: SECRET_KEY.into(),
            session_token: None,
        }),
        env: EnvironmentSource::fixed([]),
        ..OriginOptions::default()
    };
    let bucket = open("s3://bucket", &config, Arc::new(Stats::default()))?;
    let folder = open(
        dir.path().join("bucket").to_str().ok_or("a path that is no text")?,
        &OriginOptions::default(),
        Arc::new(Stats::default()),
    )?;
    let plain = AmazonS3Builder::new()
        .with_endpoint(&endpoint)
        .with_bucket_name("bucket")
        .with_access_key_id(ACCESS_KEY)
        .with_secret_access_key(SECRET_KEY)
        .with_region("us-east-1")
        .with_allow_http(true)
        .build()?;

    let mut results: [Vec<(f64, f64)>; 4] = Default::default();
    for round in 0..=rounds {
        let answers = [
            measure(size, || plain_read(&plain, size, range, threads, false))?,
            measure(size, || plain_read(&plain, size, range, threads, true))?,
            measure(size, || under_read(&*bucket, size, range, threads))?,
            measure(size, || under_read(&*folder, size, range, threads))?,
        ];
        // The first round warms connections and the server's page cache.
        if round > 0 {
            for (all, one) in results.iter_mut().zip(answers) {
                all.push(one);
            }
        }
    }
    drop(server.stdin.take());
    server.wait()?;
    println!("{} MiB in {} MiB ranges, {threads} at once, medians of {rounds}", size >> 20, range >> 20);
    let names =
        ["object_store, bytes dropped", "object_store, copied out", "s3:// through under", "file:// through under"];
    let mut base = 0.0;
    for (name, mut all) in names.into_iter().zip(results) {
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let speed = all[all.len() / 2].0;
        all.sort_by(|a, b| a.1.total_cmp(&b.1));
        let cpu = all[all.len() / 2].1;
        if base == 0.0 {
            base = speed;
        }
        println!("{name:<28} {speed:6.2} GiB/s  {:5.2} of the first  {cpu:6.3} CPU-s/GiB", speed / base);
    }
    Ok(())
}

/// GiB per second and CPU seconds per GiB of this process.
fn measure(size: u64, run: impl FnOnce() -> Result<(), AnyError>) -> Result<(f64, f64), AnyError> {
    let gib = size as f64 / f64::from(1 << 30);
    let (cpu, started) = (cpu_seconds()?, Instant::now());
    run()?;
    Ok((gib / started.elapsed().as_secs_f64(), (cpu_seconds()? - cpu) / gib))
}

fn cpu_seconds() -> Result<f64, AnyError> {
    // Nanoseconds on a CPU of every thread there is; threads that ended in between are the bench's own few.
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / 100.0)
}

fn plain_read(store: &AmazonS3, size: u64, range: u64, at_once: usize, copy: bool) -> Result<(), AnyError> {
    use futures::{StreamExt as _, TryStreamExt as _};
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let path = object_store::path::Path::from("big");
    runtime.block_on(async {
        futures::stream::iter((0..size).step_by(range as usize).map(|at| {
            let (store, path) = (store.clone(), path.clone());
            tokio::spawn(async move {
                let end = (at + range).min(size);
                if !copy {
                    let mut stream = store.get_opts_range(&path, at..end).await?;
                    let mut n = 0;
                    while let Some(chunk) = stream.try_next().await? {
                        n += chunk.len() as u64;
                    }
                    assert_eq!(n, end - at);
                    return Ok::<_, object_store::Error>(());
                }
                let bytes = store.get_range(&path, at..end).await?;
                assert_eq!(bytes.len() as u64, end - at);
                Ok(())
            })
        }))
        .buffer_unordered(at_once)
        .map(|joined| joined.map_err(AnyError::from)?.map_err(AnyError::from))
        .try_collect::<Vec<()>>()
        .await
    })?;
    Ok(())
}

trait Ranged {
    async fn get_opts_range(
        &self,
        path: &object_store::path::Path,
        range: std::ops::Range<u64>,
    ) -> object_store::Result<futures::stream::BoxStream<'static, object_store::Result<bytes::Bytes>>>;
}

impl Ranged for AmazonS3 {
    async fn get_opts_range(
        &self,
        path: &object_store::path::Path,
        range: std::ops::Range<u64>,
    ) -> object_store::Result<futures::stream::BoxStream<'static, object_store::Result<bytes::Bytes>>> {
        use object_store::ObjectStore as _;
        let options = object_store::GetOptions { range: Some(range.into()), ..Default::default() };
        Ok(self.get_opts(path, options).await?.into_stream())
    }
}

fn under_read(store: &dyn OriginStore, size: u64, range: u64, threads: usize) -> Result<(), AnyError> {
    let deadline = Instant::now() + Duration::from_secs(300);
    let attr = store.lookup(b"big", deadline)?;
    let object = ObjectRef::new(store.source_url(), b"big", attr.version, attr.size);
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| -> Result<(), spurline_types::Error> {
                    let mut buffer = vec![0; range as usize];
                    loop {
                        let at = next.fetch_add(range, Ordering::Relaxed);
                        if at >= size {
                            return Ok(());
                        }
                        let len = (size - at).min(range) as usize;
                        store.read(&object, at, &mut SliceSink::new(&mut buffer[..len]), deadline)?;
                    }
                })
            })
            .collect();
        for reader in readers {
            reader.join().map_err(|_| "a reader panicked")??;
        }
        Ok(())
    })
}
