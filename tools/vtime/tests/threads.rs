//! Threads on virtual time: waits cost no real time, the seed decides the order, and every wait of std and
//! parking_lot is covered.

use parking_lot::{Condvar, Mutex};
use spurline_vtime::{can_fix_addresses, fix_addresses, run};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const DAY: Duration = Duration::from_secs(86_400);

/// Threads that pass a number on, wait with and without a timeout, sleep, and end.
fn busy() -> Vec<u32> {
    let (order, turn) = (Arc::new(Mutex::new(Vec::new())), Arc::new((Mutex::new(0), Condvar::new())));
    let threads: Vec<_> = (0..5u32)
        .map(|n| {
            let (order, turn) = (Arc::clone(&order), Arc::clone(&turn));
            std::thread::spawn(move || {
                for round in 0..20u32 {
                    order.lock().push(n);
                    let mut count = turn.0.lock();
                    *count += 1;
                    turn.1.notify_one();
                    if round % 3 == 0 {
                        turn.1.wait_for(&mut count, Duration::from_millis(7));
                    }
                    drop(count);
                    std::thread::sleep(Duration::from_millis(u64::from(n)));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    order.lock().clone()
}

#[test]
fn a_day_costs_nothing_and_is_measured_exactly() {
    let (took, ran) = run(1, || {
        let start = Instant::now();
        std::thread::sleep(DAY);
        let (sender, receiver) = mpsc::channel::<()>();
        assert!(receiver.recv_timeout(DAY).is_err());
        drop(sender);
        let lock = Mutex::new(());
        assert!(Condvar::new().wait_for(&mut lock.lock(), DAY).timed_out());
        start.elapsed()
    });
    assert!(took >= 3 * DAY && took < 3 * DAY + Duration::from_millis(1), "{took:?}");
    assert!(ran.left.is_empty(), "{ran:?}");
}

#[test]
fn all_threads_of_a_run_are_on_one_processor_and_others_are_not_kept_there() {
    let processors = || std::thread::available_parallelism().map(usize::from).ok();
    let before = processors();
    let (of_run, _) = run(1, || (processors(), std::thread::spawn(processors).join().unwrap()));
    assert_eq!((of_run, processors()), ((Some(1), Some(1)), before));
}

/// The order of a seed, in a process of its own: `parking_lot` decides by addresses too.
fn order_of(seed: u64) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["prints_the_order_of_a_seed", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env(SEED_VARIABLE, seed.to_string());
    fix_addresses(&mut command);
    let out = command.output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines().find(|line| line.contains("order: ")).unwrap_or_else(|| panic!("{text}")).to_owned()
}

const SEED_VARIABLE: &str = "SPURLINE_TEST_ORDER_OF_SEED";

#[test]
#[ignore = "run by the_seed_decides_the_order"]
fn prints_the_order_of_a_seed() {
    let Ok(seed) = std::env::var(SEED_VARIABLE) else { return };
    let (order, ran) = run(seed.parse().unwrap(), busy);
    assert_eq!(order.len(), 100);
    println!("order: {order:?}, {ran:?}");
}

#[test]
fn the_seed_decides_the_order() {
    if !can_fix_addresses() {
        println!("SKIP: this system gives no fixed addresses");
        return;
    }
    let first = order_of(7);
    for _ in 0..5 {
        assert_eq!(order_of(7), first);
    }
    assert!((8..12).any(|seed| order_of(seed) != first), "other seeds, other orders");
}

#[test]
fn those_who_are_left_behind_are_named() {
    let ((), ran) = run(3, || {
        std::thread::spawn(|| {
            loop {
                std::thread::park();
            }
        });
        std::thread::spawn(|| std::thread::sleep(Duration::from_secs(60)));
    });
    assert_eq!(ran.left.len(), 1, "{ran:?}");
}

#[test]
fn locks_are_handed_over_and_panics_come_out() {
    let count = AtomicU32::new(0);
    let ((), _) = run(5, || {
        let lock = std::sync::Mutex::new(0u32);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let mut held = lock.lock().unwrap();
                        *held += 1;
                        std::thread::sleep(Duration::from_micros(10));
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(*lock.lock().unwrap(), 400);
    });
    assert_eq!(count.load(Ordering::Relaxed), 400);
    let panicked = std::panic::catch_unwind(|| run(6, || panic!("as it should"))).err();
    assert_eq!(panicked.and_then(|p| p.downcast_ref::<&str>().copied()), Some("as it should"));
    assert_eq!(run(6, || 1).0, 1);
}
