//! A node whose settings place blocks differently than before, or than the rest of its group: refused unless
//! intended.

use crate::group::coordinator;
use spurline_rig::world::*;

mod test_all {
    use super::*;

    #[test]
    fn settings_that_place_blocks_elsewhere_have_to_be_meant() {
        let world = World::new();
        let source = world.dir("source");
        let (_coordinator, address) = coordinator(&world, 0);
        let registry = format!("coordinator://{address}");
        let start = |cache: &str, more: &[&str]| {
            let cache = world.dir(cache);
            let mut command = world.command(&["node", "--source", source.to_str().unwrap(), "--registry", &registry]);
            command.args(["--cache-dir", cache.to_str().unwrap()]).args(more);
            command
        };
        let one = world.node_with(&mut start("cache-one", &["--name", "one", "--zone", "r1"]));
        let two = |more: &[&str]| start("cache-two", more);
        // Stopped gracefully, so that its name is free for another address.
        let served = |more: &[&str]| {
            let mut node = world.node_with(&mut two(more));
            node.process.signal(rustix::process::Signal::TERM);
            assert!(node.process.wait().success(), "{}", node.process.log());
            node.process.log()
        };
        served(&["--name", "two", "--zone", "r1"]);
        // Others than its cache was filled by: both values, and what to give instead.
        let renamed = finish(&mut two(&["--name", "deux", "--zone", "r1"]));
        refused(&renamed, 2, &["cache-two", "--name was 'two' and is 'deux'", "--name two", "--yes"]);
        refused(&finish(&mut two(&["--name", "two"])), 2, &["--zone was 'r1' and is ''", "--zone r1", "--yes"]);
        // Others than the group's.
        let blocks = finish(&mut start("cache-three", &["--name", "three", "--block-size", "2M"]));
        refused(
            &blocks,
            2,
            &["node one of the group", "--block-size is 2M here and 1M there", "--block-size 1M", "--yes"],
        );
        // A start that the group refused leaves no name in its directory: the right one can still start there.
        let taken = finish(&mut start("cache-four", &["--name", "one", "--zone", "r1"]));
        refused(&taken, 2, &["group default has a node 'one' already"]);
        assert!(!world.path("cache-four/settings.json").exists());
        let four = world.node_with(&mut start("cache-four", &["--name", "four", "--zone", "r4"]));
        assert!(world.path("cache-four/settings.json").exists());
        // Unchanged settings need no confirmation; a confirmed change is logged and becomes the new state.
        served(&["--name", "two", "--zone", "r1"]);
        let said = served(&["--name", "deux", "--zone", "r2", "--yes"]);
        assert!(said.contains("accepted by --yes: --name was 'two' and is 'deux'"), "{said}");
        served(&["--name", "deux", "--zone", "r2"]);
        let other = world.node_with(&mut start("cache-three", &["--name", "three", "--block-size", "2M", "--yes"]));
        assert!(other.process.log().contains("accepted by --yes, beside node one"), "{}", other.process.log());
        drop((one, four, other));
    }
}
