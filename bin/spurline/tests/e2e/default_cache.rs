//! Mounts that name no cache directory, in a mount namespace with a /var/cache of its own.

use spurline_rig::world::*;
use std::process::Command;

/// Two mounts with the defaults, and one of them again; `$0` is the program, `$1` a directory with the sources a and b.
const SCRIPT: &str = r#"
mount -t tmpfs cache /var/cache
cd "$1"
for name in a b; do
    "$0" mount "$1/$name" "$1/mnt-$name" -d --log "$1/log-$name"
    cat "mnt-$name/file" > /dev/null
done
echo "folders: $(ls /var/cache/spurline | wc -l)"
for name in a b; do "$0" umount "$1/mnt-$name"; done
"$0" mount "$1/a" "$1/mnt-a" -d --log "$1/log-a"
echo "folders: $(ls /var/cache/spurline | wc -l)"
"$0" stats "$1/mnt-a" --json -c 1
for folder in /var/cache/spurline/*; do echo "$(cat "$folder/used") bytes in $(basename "$folder")"; done
if "$0" mount "$1/b" "$1/mnt-b" --cache-dir /var/cache/spurline/*mnt-a-*; then echo "both have one directory"; fi
"$0" cache list --json
if "$0" cache clean; then echo "removed without consent"; fi
"$0" cache clean --yes
echo "left: $(basename /var/cache/spurline/*)"
"$0" umount "$1/mnt-a"
"$0" cache clean --yes --json
"#;

#[test]
fn mounts_without_a_cache_directory_have_one_each_and_find_it_again() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    for name in ["a", "b"] {
        world.file(&format!("{name}/file"), &bytes(1, 3 * MIB));
        world.dir(&format!("mnt-{name}"));
    }
    let command = world.command(&[]);
    let mut apart = Command::new("unshare");
    apart.args(["--mount", "--propagation", "private", "sh", "-ec", SCRIPT]);
    apart.arg(command.get_program()).arg(world.path(""));
    same_environment(&mut apart, &command);
    let out = finish(&mut apart);
    let said = String::from_utf8_lossy(&out.stdout);
    let failed = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}{failed}");
    assert_eq!(said.matches("folders: 2").count(), 2, "{said}");
    let stats = said.lines().find(|line| line.starts_with('{')).unwrap();
    let stats: serde_json::Value = serde_json::from_str(stats).unwrap();
    assert_eq!(count(&stats, "blockcache", "blocks"), 3, "the blocks of the first mount are found again");
    // One is in use, and the other is removed with consent alone.
    let caches = said.lines().find(|line| line.contains("unused_bytes")).unwrap();
    let caches: serde_json::Value = serde_json::from_str(caches).unwrap();
    assert_eq!(caches["unused_bytes"], 3 * MIB, "{caches}");
    for (n, (name, in_use)) in [("a", true), ("b", false)].into_iter().enumerate() {
        let cache = &caches["caches"][n];
        assert_eq!(cache["in_use"], in_use, "{caches}");
        assert_eq!(cache["sources"][0], format!("file://{}", world.path(name).display()), "{caches}");
        assert!(cache["last_used"].as_i64().unwrap() > 1_700_000_000, "{caches}");
    }
    assert!(failed.contains("say --yes") && said.contains("MiB removed; 1 of 2 directories"), "{said}{failed}");
    assert_eq!(said.matches("left: ").count(), 1, "{said}");
    assert!(said.lines().any(|line| line.starts_with("left: ") && line.contains("mnt-a")), "{said}");
    assert!(said.contains(&format!("\"removed_bytes\":{}", 3 * MIB)), "{said}");
    // The other processes see what each holds, also after its end.
    assert_eq!(said.matches(&format!("{} bytes in ", 3 * MIB)).count(), 2, "{said}");
    assert!(failed.contains("is in use by the process with pid"), "{failed}");
}
