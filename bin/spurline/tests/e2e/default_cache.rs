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
"$0" umount "$1/mnt-a"
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
    // The other processes see what each holds, also after its end.
    assert_eq!(said.matches(&format!("{} bytes in ", 3 * MIB)).count(), 2, "{said}");
    assert!(failed.contains("is in use by the process with pid"), "{failed}");
}
