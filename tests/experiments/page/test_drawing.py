"""What stands beside a picture leaves room for it."""

from mrp_lightning.experiments.pictures import label_ends, new_figure


def test_long_names_at_the_ends_of_lines_leave_room_for_the_axes():
    figure, axes = new_figure(2.5)
    axes.plot([0, 9], [1, 2])
    mixed = 'best, calibration {"notes/a.txt": 0.5, "self": 0.5}'
    names = ("best, calibration notes/of/mine.txt", mixed)
    label_ends(axes, {name: (9, y, "C0") for name, y in zip(names, (1, 2), strict=True)})
    figure.draw_without_rendering()
    assert axes.get_position().width > 0.4
    width, height = figure.get_size_inches() * figure.dpi
    for text in axes.texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
