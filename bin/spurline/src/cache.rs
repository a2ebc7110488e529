//! `spurline cache`: the cache directories of this user, and the removal of those that no process uses.

use crate::cli::{CacheAction, CacheCleanArgs, CacheListArgs};
use crate::report::{has_consent, print_fault, print_note, printable};
use serde_json::{Value, json};
use spurline_config::{Fault, HostLimits, default_cache_dir};
use spurline_runtime::cache_dirs::{CacheDir, list_cache_dirs};
use spurline_runtime::rules::human_time;
use spurline_types::units::human_bytes;
use spurline_types::unix_time;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

/// Runs `spurline cache`; exit code 1 when a directory could not be removed.
///
/// # Errors
/// When a named directory holds no cache, or the removal has no consent.
pub fn run(action: &CacheAction) -> Result<ExitCode, Fault> {
    match action {
        CacheAction::List(args) => list(args),
        CacheAction::Clean(args) => clean(args),
    }
}

fn find_caches(dirs: &[PathBuf]) -> Result<Vec<CacheDir>, Fault> {
    if dirs.is_empty() {
        return Ok(list_cache_dirs(&default_cache_dir(&HostLimits::detect())?));
    }
    let mut found = Vec::new();
    for dir in dirs {
        let below = list_cache_dirs(dir);
        if below.is_empty() {
            return Err(Fault::failed(
                format!("{} is no cache directory and has none in it", dir.display()),
                "name a --cache-dir, or the folder of several",
            ));
        }
        found.extend(below);
    }
    Ok(found)
}

fn list(args: &CacheListArgs) -> Result<ExitCode, Fault> {
    let caches = find_caches(&args.dir)?;
    let unused: u64 = caches.iter().filter(|cache| !cache.in_use).map(|cache| cache.used_bytes).sum();
    if args.json {
        let all: Vec<Value> = caches.iter().map(describe).collect();
        anstream::println!("{}", json!({"caches": all, "unused_bytes": unused}));
        return Ok(ExitCode::SUCCESS);
    }
    for cache in &caches {
        let ago = cache.last_used.elapsed().map_or(0, |ago| ago.as_secs());
        let state = if cache.in_use { "in use".to_owned() } else { format!("last used {} ago", human_time(ago)) };
        anstream::println!(
            "{}  {}, {state}, of {}",
            printable(cache.path.as_os_str().as_encoded_bytes()),
            human_bytes(cache.used_bytes),
            if cache.sources.is_empty() {
                "an unknown source".to_owned()
            } else {
                printable(cache.sources.join(" and ").as_bytes())
            }
        );
    }
    anstream::println!("{} without a process; spurline cache clean removes them", human_bytes(unused));
    Ok(ExitCode::SUCCESS)
}

fn clean(args: &CacheCleanArgs) -> Result<ExitCode, Fault> {
    let caches = find_caches(&args.places.dir)?;
    let as_json = args.places.json;
    let unused: Vec<&CacheDir> = caches.iter().filter(|cache| !cache.in_use).collect();
    let paths: Vec<String> = unused.iter().map(|cache| cache.path.display().to_string()).collect();
    for cache in caches.iter().filter(|cache| cache.in_use) {
        print_note(&format!("{} is in use, and stays", cache.path.display()));
    }
    let what = format!("the cached blocks in {} will be removed", paths.join(", "));
    if !args.yes && !unused.is_empty() && (as_json || !has_consent(&what)) {
        if !as_json && std::io::stdin().is_terminal() {
            print_note("nothing was removed");
            return Ok(ExitCode::FAILURE);
        }
        return Err(Fault::failed(what, "say --yes"));
    }
    let mut removed = Vec::new();
    let mut failed = false;
    for cache in unused {
        match cache.remove_unused() {
            Ok(true) => {
                if cache.path.exists() {
                    print_note(&format!("{} stays: it is a mountpoint, or has files of others", cache.path.display()));
                }
                removed.push(cache);
            }
            // A process has started there since.
            Ok(false) => {}
            Err(error) => {
                failed = true;
                let what = format!("{} was not removed: {error}", cache.path.display());
                print_fault(&Fault::failed(what, "run this as the user of its process, or as root"));
            }
        }
    }
    let bytes: u64 = removed.iter().map(|cache| cache.used_bytes).sum();
    if as_json {
        let all: Vec<Value> = removed.into_iter().map(describe).collect();
        anstream::println!("{}", json!({"removed": all, "removed_bytes": bytes}));
    } else {
        anstream::println!("{} removed; {} of {} directories", human_bytes(bytes), removed.len(), caches.len());
    }
    Ok(ExitCode::from(u8::from(failed)))
}

fn describe(cache: &CacheDir) -> Value {
    json!({
        "path": cache.path.display().to_string(),
        "used_bytes": cache.used_bytes,
        "last_used": unix_time(cache.last_used).0,
        "sources": cache.sources,
        "in_use": cache.in_use,
    })
}
