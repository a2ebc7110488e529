//! Path selection by speed, by measured reads and by the location of the memory.

use super::*;

/// 32 reads of a MiB over the first of two paths, each this long.
fn reads(pool: &RailPool, ms: u64) {
    for _ in 0..32 {
        pool.record_read(0, 1 << 20, Duration::from_millis(ms));
    }
}

struct Silent(crate::ConnectionEndpoints);

impl Channel for Silent {
    fn call(
        &mut self,
        _: &spurline_proto::NodeRequest<'_>,
        _: &mut Vec<u8>,
        _: &mut [u8],
        _: &mut dyn FnMut(usize),
        _: Instant,
    ) -> Result<crate::CallAnswer, crate::CallError> {
        panic!("no request is expected")
    }
    fn endpoints(&self) -> &crate::ConnectionEndpoints {
        &self.0
    }
    fn looks_alive(&mut self) -> bool {
        true
    }
}

/// Two paths of equal speed over two rails, with this many channels each.
fn two_rails(channels: usize, rails: &Arc<RailLoads>) -> RailPool {
    let specs =
        (0..2).map(|local| PathSpec { name: local.to_string(), kind: TransportKind::Rdma, local, speed_mbit: 100_000 });
    let timing = PathTiming::default();
    let pool = RailPool::new("n:7000", specs.collect(), channels, timing, 1, Arc::default(), Arc::default());
    let pool = pool.with_rail_loads(Arc::clone(rails));
    for path in pool.begin_due() {
        for n in 0..channels {
            let end = String::new;
            let channel =
                Box::new(Silent(crate::ConnectionEndpoints { kind: TransportKind::Rdma, local: end(), peer: end() }));
            match n {
                0 => pool.path_connected(path, channel, Arc::default(), None),
                _ => pool.add_channel(path, 0, Ok((channel, Arc::default()))),
            }
        }
    }
    pool
}

#[test]
fn the_rail_near_the_memory_is_taken_where_no_other_would_lie_idle_for_it() {
    let rails = Arc::new(RailLoads::default());
    let pool = two_rails(8, &rails);
    let other = two_rails(8, &rails);
    let take = |from: &'static str, near| {
        let pool = if from == "other" { &other } else { &pool };
        pool.checkout(Instant::now() + Duration::from_secs(60), near).unwrap().unwrap()
    };
    for _ in 0..64 {
        for near in 0..2 {
            assert_eq!(take("", 1 << near).path(), near, "both are idle");
            let first = take("", 1 << near);
            let second = take("", 1 << near);
            assert_eq!((first.path(), second.path()), (near, 1 - near), "no rail is left idle");
            // The load is equal on both.
            assert_eq!(take("", 1 << near).path(), near);
            drop((first, second));
            // Another peer's reads keep the near rail busy.
            let busy = take("other", 1 << near);
            let beside = pool.checkout_beside(0, 1 << near).unwrap();
            assert_eq!((busy.path(), beside.0.path()), (near, 1 - near));
        }
    }
    // Where all memory is equally near, both are taken, at random.
    let taken: Vec<usize> = (0..64).map(|_| take("", 0).path()).collect();
    assert!(taken.contains(&0) && taken.contains(&1));
    assert!(rails.0.iter().all(|load| load.load(Ordering::Relaxed) == 0));
}

#[test]
fn a_path_that_is_slower_since_it_is_back_is_loaded_less_until_it_is_not() {
    let stats = Arc::new(Stats::default());
    let specs = vec![path_spec("a"), path_spec("b")];
    let pool = RailPool::new("n:7000", specs, 2, PathTiming::default(), 1, Arc::clone(&stats), Arc::default());
    let shown = |name: &str| stats.to_json()["paths"][0][name].as_u64();
    reads(&pool, 10);
    assert_eq!(
        (shown("usual_bytes_per_s"), shown("speed_checks"), pool.compare_load(0, 1).is_eq()),
        (Some(100 << 20), Some(0), true)
    );
    pool.paths[0].speed.lock().path_returned();
    (0..3).for_each(|_| reads(&pool, 100));
    assert_eq!((shown("speed_checks"), shown("slower")), (Some(1), Some(1)));
    assert!(pool.view()[0].speed.is_some_and(|check| check.slower) && pool.view()[1].speed.is_none());
    // Loaded as if a tenth as fast, so the other path is preferred.
    assert!((40_000..48_000).contains(&pool.paths[0].load_speed()) && pool.compare_load(0, 1).is_gt());
    reads(&pool, 10);
    assert_eq!((shown("speed_checks"), shown("slower"), pool.compare_load(0, 1).is_eq()), (Some(2), Some(0), true));
    assert_eq!(shown("checked_bytes_per_s"), Some(100 << 20));
}

fn path_spec(name: &str) -> PathSpec {
    PathSpec { name: name.into(), kind: TransportKind::Rdma, local: 0, speed_mbit: 400_000 }
}

#[test]
fn a_path_whose_last_channel_is_gone_and_that_gets_no_other_is_down() {
    let pool = two_rails(1, &Arc::default());
    let far = Instant::now() + Duration::from_secs(3600);
    for left in [1, 0] {
        // Lost without a fault of the path: another node answered first.
        let mut lease = pool.checkout(far, 0).unwrap().unwrap();
        let path = lease.path();
        lease.discard_channel();
        assert_eq!((pool.up(), pool.view()[path].channels), (left + 1, 0), "one more channel may be had");
        let wanting = pool.begin_growing();
        assert!(wanting.contains(&(path, 0)) && pool.begin_growing().is_empty(), "{wanting:?}");
        pool.add_channel(path, 0, Err(Error::new(ErrorKind::Unavailable, "the node takes no more")));
        let view = &pool.view()[path];
        assert!(view.phase != PathPhase::Up && view.reason.as_ref().unwrap().contains("takes no more"), "{view:?}");
        assert_eq!(pool.up(), left);
    }
    // No wait for a channel: the request uses TCP.
    assert!(pool.checkout(far, 0).unwrap().is_none());
    // A path with a channel left stays up.
    let pool = two_rails(2, &Arc::default());
    let mut lease = pool.checkout(far, 0).unwrap().unwrap();
    lease.discard_channel();
    for (path, generation) in pool.begin_growing() {
        pool.add_channel(path, generation, Err(Error::new(ErrorKind::Unavailable, "the node takes no more")));
    }
    assert_eq!(pool.up(), 2);
}

#[test]
fn idle_channels_of_each_path_are_closed_but_for_one() {
    let pool = two_rails(4, &Arc::default());
    let used = pool.checkout(Instant::now() + Duration::from_secs(60), 1).unwrap().unwrap();
    pool.close_idle(Duration::from_secs(3600));
    assert_eq!(channel_counts(&pool), [4, 4], "all are new");
    pool.close_idle(Duration::ZERO);
    assert_eq!(channel_counts(&pool), [2, 1], "one of the first is in use");
    drop(used);
    pool.close_idle(Duration::ZERO);
    assert_eq!((channel_counts(&pool), pool.up()), (vec![1, 1], 2));
}

fn channel_counts(pool: &RailPool) -> Vec<usize> {
    pool.view().iter().map(|path| path.channels).collect::<Vec<_>>()
}
