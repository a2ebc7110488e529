//! pjdfstest on a directory, and on a mount of it beside. It knows neither mounts nor nodes.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The outcome of each test, by name.
pub type TestOutcomes = BTreeMap<String, String>;

/// The configuration, with the time in seconds after which two changes have different times.
pub fn configuration(naptime: &str) -> String {
    format!(
        r#"
[features]
posix_fallocate = {{}}
rename_ctime = {{}}
stat_st_birthtime = {{}}
utime_now = {{}}
utimensat = {{}}
[settings]
naptime = {naptime}
allow_remount = false
[dummy_auth]
entries = [["daemon", "daemon"], ["bin", "bin"]]
"#
    )
}

/// Runs the tests with these patterns in `at`; there have to be more than `least`.
pub fn run_in(program: &Path, config: &Path, at: &Path, patterns: &[&str], least: usize) -> TestOutcomes {
    let mut command = Command::new(program);
    let out = command.arg("-c").arg(config).arg("-p").arg(at).args(patterns).env("NO_COLOR", "1").output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let outcome = |line: &str| {
        let (name, outcome) = line.split_once(char::is_whitespace)?;
        name.contains("::").then(|| (name.to_owned(), outcome.trim().to_owned()))
    };
    let outcomes: TestOutcomes = text.lines().filter_map(outcome).collect();
    assert!(outcomes.len() > least, "{text}\n{}", String::from_utf8_lossy(&out.stderr));
    outcomes
}

/// Checks that the mount has the outcome of the bare directory in each test that counts; returns how many pass there.
pub fn check_equal(way: &str, bare: &TestOutcomes, mount: &TestOutcomes, counts: impl Fn(&str) -> bool) -> usize {
    let worse: Vec<_> =
        bare.iter().filter(|(name, outcome)| counts(name) && mount.get(*name) != Some(outcome)).collect();
    assert!(worse.is_empty(), "{way}; on the bare directory: {worse:?}; on the mount: {mount:?}");
    mount.values().filter(|outcome| *outcome == "ok").count()
}
