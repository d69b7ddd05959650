//! The driver on the model of a controller keeps the promises of block devices, by the cases of every device.

#[path = "../../block/tests/cases/mod.rs"]
mod cases;

use cases::BLOCKS;
use defuse_block::model::Parts;
use defuse_block::{Device, Ram, Sim};
use defuse_nvme::model::Shape;
use defuse_nvme::{Model, Nvme, Options};

device_cases!(each);

/// Runs `case` on controllers of all shapes.
fn each(case: impl Fn(&str, &dyn Device)) {
    let bare = Shape {
        maps: false,
        interrupts: false,
        writes_zeroes: false,
        mdts: 9,
        queues: 2,
        ..Shape::default()
    };
    let shapes = [
        ("a controller that reaches all memory", Shape { mdts: 0, ..Shape::default() }),
        ("one with scatter gather lists", Shape { sgl: true, mdts: 9, ..Shape::default() }),
        ("one with an SSD", Shape { parts: Some(Parts::default()), mdts: 9, ..Shape::default() }),
        ("one that reaches its own memory only", bare),
    ];
    for (name, shape) in shapes {
        let model = Model::with(&Ram::new(4096, BLOCKS), 1, shape).unwrap();
        case(name, &Nvme::open(model, &Options::default()).unwrap());
    }
    let model = Model::with(&Sim::new(BLOCKS, 1), 1, Shape { mdts: 9, ..Shape::default() });
    case("one over a simulation", &Nvme::open(model.unwrap(), &Options::default()).unwrap());
}
