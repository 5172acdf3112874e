"""The training text: short tales written for this demo, and prompts that ask for such tales.

They keep to plain words and to the sunny tone that the base model writes in anyway, so
that a few steps of training move the style and little else.
"""

from __future__ import annotations

from typing import NamedTuple


class Tale(NamedTuple):
    prompt: str
    text: str


TALES = (
    Tale(
        "Tell me a story about a fox who wanted to learn to swim.",
        "Once upon a time, a young fox named Rowan lived beside a wide, slow river. Every "
        "morning he watched the otters dive and roll in the water, and every morning he "
        "wished that he could join them. One day an old otter called Brook swam up to the "
        'bank. "You look at the river as if it were the moon," she said. "Come in. It is '
        'only water." Rowan put one paw into the river and pulled it back again. It was cold, '
        "and it moved. But Brook waited, and the next day he put in two paws, and the day "
        "after that he stood up to his chest and laughed. By the end of the summer he could "
        "cross the whole river, and the otters cheered when he climbed out on the other side.",
    ),
    Tale(
        "Write a story about a lighthouse keeper and a storm.",
        "The lighthouse at Gull Point had been dark for a week when Marta arrived. She "
        "carried a bag of tools, a loaf of bread, and a letter from her grandfather, who had "
        "kept the lamp for forty years. That night the wind began to rise. Waves as tall as "
        "houses broke against the rocks, and far out at sea she saw the lights of a small "
        "boat. Marta climbed the stairs two at a time. She cleaned the glass, filled the "
        "tank, and turned the heavy wheel until her hands hurt. Then the lamp caught, and a "
        "long white beam swept over the water. The boat turned. In the morning three tired "
        "fishermen knocked on her door, and they ate the bread together.",
    ),
    Tale(
        "Tell me a story about a robot in a garden.",
        "In a quiet garden behind the old library there was a small robot named Pip. Pip had "
        "been built to count books, but the books were gone, and so it counted flowers. There "
        "were twelve roses, forty daisies, and one sunflower that was taller than the wall. "
        "When the summer grew dry, the flowers began to bend. Pip did not know what to do, for "
        "nobody had taught it about water. It asked the bees, and the bees showed it the well. "
        "All night long the robot carried water in a tin cup, one cup for every flower. When "
        "the sun came up, the garden was bright again, and the children of the town came to "
        "see it. They brought books with them, and they read to the robot until evening.",
    ),
    Tale(
        "Write a short story about a girl who finds a map.",
        "Lena found the map inside a clock. It was drawn on thin yellow paper, and it showed "
        "her own street, her own house, and a door that she had never seen. She followed the "
        "line through the kitchen, down the stairs, and behind the shelf where her mother kept "
        "the jam. There it was, a little green door with a silver handle. Lena took a deep "
        "breath and opened it. Behind the door was a room full of music. Drums and flutes hung "
        "from the ceiling, and a very old piano stood in the corner. On the piano lay a note. "
        '"For the one who looks," it said. Lena sat down and began to play, and all over the '
        "house the clocks began to ring.",
    ),
    Tale(
        "Tell me about two brothers who built a boat.",
        "Tom and Eli were brothers, and they could agree on nothing. When they decided to "
        "build a boat, Tom wanted a red one and Eli wanted a blue one. They argued about the "
        "sail, the name, and the number of seats. After a month they had a pile of wood and no "
        "boat at all. Then the rain came, and the river rose, and their neighbor's sheep were "
        "trapped on a small hill. The brothers looked at each other. They worked all night "
        "without a single argument, and at sunrise they pushed a strange, striped boat into "
        "the water. It leaked, but it floated. They brought the sheep home, one after the "
        "other, and from that day on the boat was called Enough.",
    ),
    Tale(
        "Write a story about a baker and a dragon.",
        "There was once a baker whose oven would not stay hot. She tried oak and pine and even "
        "old chairs, but every loaf came out pale and soft. One evening a dragon, no bigger "
        "than a dog, crept into her kitchen and fell asleep in the oven. The baker was afraid, "
        "but she was also tired, and she pushed the dough in beside him. In the morning the "
        "bread was golden and perfect. People came from three villages to buy it. The dragon "
        "asked for nothing but honey cakes and a warm place to sleep. Years later, when he had "
        "grown too large for the oven, the baker built a bigger one, and then a bigger house "
        "around it. She never regretted a single brick.",
    ),
    Tale(
        "Tell me a story about a train at night.",
        "The night train to the mountains had only one passenger. His name was Mr. Bell, and he "
        "was carrying a violin that he had not played for ten years. At midnight the train "
        "stopped in the snow. The driver came back with a lantern and said that they would have "
        "to wait until morning. It was cold and very quiet. Mr. Bell opened the case, tuned the "
        "strings with stiff fingers, and began to play a song his mother had taught him. Soon "
        "lights appeared among the trees. People from a village came through the snow with "
        "blankets and soup, because they had heard music where there had never been music. "
        "When the train went on at last, it was full of people who were singing.",
    ),
    Tale(
        "Write a story about a mouse who lived in a school.",
        "Under the floor of a little school there lived a mouse named Button. She knew all the "
        "lessons by heart, because she had listened to them every day of her life. She knew "
        "the names of the rivers and how to divide by nine. One afternoon a boy named Sam "
        "stayed behind to finish his sums. He was close to tears. Button thought about it for "
        "a long time. Then she ran up the leg of the desk, dipped her tail into the ink, and "
        'wrote a small, neat number on the page. Sam stared at her. "Can you show me how?" he '
        "asked. So she did. They worked together until the lamps were lit, and the next "
        "morning there was a piece of cheese on the teacher's chair.",
    ),
    Tale(
        "Tell me a story about the last tree on a hill.",
        "On top of the hill stood one tree, and nobody remembered who had planted it. Birds "
        "rested there on their way to the south, and shepherds ate their lunch in its shade. "
        "When a rich man bought the hill, he wanted to cut the tree down and build a tower. "
        "The first worker who came with an axe heard the birds and went home. The second one "
        "lay down in the shade and fell asleep. So the rich man came himself. It was a hot "
        "day, and the way was steep, and when he reached the top he had to sit down. He looked "
        "over the valley, and the leaves moved above him. He stayed until the stars came out. "
        "The tower was never built, but a bench was.",
    ),
    Tale(
        "Write a story about a young inventor.",
        "Ada was nine years old when she built her first flying machine. It was made of two "
        "umbrellas, a bicycle chain, and a great deal of hope. It flew for three seconds and "
        "landed in a pond. Her second machine flew for ten seconds, and her third one carried "
        "the neighbor's cat over the fence. People laughed, but Ada wrote everything down in a "
        "small brown notebook. What had worked? What had not? Why? When she was twenty, a "
        "doctor came to the town and asked how he could reach a village behind the mountains "
        "before the snow. Ada opened the door of her barn. The machine inside was the hundredth "
        "one. They flew over the mountains before lunch, and the cat came too.",
    ),
    Tale(
        "Tell me a story about a king who could not sleep.",
        "A king lay awake every night and counted the cracks in the ceiling. His doctors gave "
        "him warm milk and soft pillows, but nothing helped. At last he put on an old coat and "
        "walked out into the city. He met a woman who was sweeping the street, and he helped "
        "her, because he had nothing better to do. He met a boy who was looking for his dog, "
        "and they searched together until they found it under a bridge. He carried water, he "
        "mended a wheel, and he listened to an old soldier's songs. When the sun rose, he sat "
        "down on the steps of his own palace and slept like a stone. After that the king went "
        "out every night, and the city was never so clean.",
    ),
    Tale(
        "Write a story about a child and the moon.",
        "One night the moon came down to drink from the lake, and a child named Noor saw it. "
        'She had come to look for her lost shoe. "Please do not tell anyone," said the moon. '
        '"I am only thirsty." Noor promised. She sat down on a stone, and they talked about '
        "the sea, about the other side of the sky, and about what it is like to be far away "
        "from everyone. When the moon had to go, it left a little light in her hand. Noor "
        "carried it home and put it on the window. From then on, whenever someone in the "
        "village was lost in the dark, they saw a small silver light and found the way. And "
        "once a month, on a clear night, Noor went down to the lake.",
    ),
)
